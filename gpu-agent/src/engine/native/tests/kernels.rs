//! The fast kernels against slow and obvious ones, to the bit.

use super::super::gguf::Tensor;
use super::super::kernel::Rows;
use super::super::matrix::Matrix;
use super::super::quant::Kind;
use super::super::threads::Threads;
use proptest::prelude::*;

fn bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn an_output_is_one_chain_whoever_is_beside_it(
        rows in 1_usize..15, inputs in 1_usize..4, outputs in 1_usize..70, threads in 1_usize..4, seed in any::<u32>(),
    ) {
        let inputs = inputs * 32;
        let number = |i: usize| ((i as u32).wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32 / 1e6 - 8.0;
        let weights: Vec<f32> = (0..inputs * outputs).map(number).collect();
        let x: Vec<f32> = (0..inputs * rows).map(|i| number(i + 1_000_000)).collect();
        let raw = bytes(&weights);
        let tensor = Tensor { kind: Kind::F32, shape: vec![inputs as u64, outputs as u64], bytes: &raw };
        let matrix = Matrix::new("w", &tensor, inputs, outputs).unwrap();
        let got = matrix.multiply(&Rows::pack(&x, inputs), &Threads::new(threads).unwrap());
        let mut weights = vec![0.0; inputs];
        for output in 0..outputs {
            matrix.weights(output, &mut weights);
            for row in 0..rows {
                let x = &x[row * inputs..][..inputs];
                let want = x.iter().zip(&weights).fold(0.0_f32, |sum, (x, w)| x.mul_add(*w, sum));
                prop_assert_eq!(got[row * outputs + output].to_bits(), want.to_bits());
            }
        }
    }
}

/// Known blocks, computed by hand from the formats' definitions.
#[test]
fn formats_mean_what_they_say() {
    let half = |x: f32| half::f16::from_f32(x).to_le_bytes();
    let numbers = |kind: Kind, bytes: &[u8]| -> Vec<f32> {
        let expand = |b: super::super::quant::Block| b.ints.map(|i| f32::from(i) * b.scale + b.offset);
        kind.blocks(bytes).flat_map(expand).collect()
    };
    let nibbles: Vec<u8> = (0..16).map(|i| i | (15 - i) << 4).collect();
    let q4_0 = [&half(0.5)[..], &nibbles].concat();
    let got = numbers(Kind::Q4_0, &q4_0);
    assert_eq!((got[0], got[3], got[16], got[31]), (-4.0, -2.5, 3.5, -4.0));
    let q4_1 = [&half(0.5)[..], &half(2.0), &nibbles].concat();
    let got = numbers(Kind::Q4_1, &q4_1);
    assert_eq!((got[0], got[3], got[16], got[31]), (2.0, 3.5, 9.5, 2.0));
    let fifth = 0x8000_0001_u32.to_le_bytes();
    let q5_0 = [&half(1.0)[..], &fifth, &nibbles].concat();
    let got = numbers(Kind::Q5_0, &q5_0);
    assert_eq!((got[0], got[3], got[16], got[31]), (0.0, -13.0, -1.0, 0.0));
    let q5_1 = [&half(1.0)[..], &half(-3.0), &fifth, &nibbles].concat();
    let got = numbers(Kind::Q5_1, &q5_1);
    assert_eq!((got[0], got[3], got[16], got[31]), (13.0, 0.0, 12.0, 13.0));
    let q8_0 = [&half(0.25)[..], &[0xff; 32]].concat();
    assert_eq!(numbers(Kind::Q8_0, &q8_0), [-0.25; 32]);
}

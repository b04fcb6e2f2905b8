//! The fast kernels against slow and obvious ones, to the bit.

use super::super::gguf::Tensor;
use super::super::kernel::Rows;
use super::super::matrix::Matrix;
use super::super::quant::{Block, Kind};
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

/// Bytes by a formula, the first halves given.
fn piece(bytes: usize, at: usize, halves: &[f32]) -> Vec<u8> {
    let mut out: Vec<u8> = (0..bytes).map(|i| (i * 37 + 11) as u8).collect();
    for (i, half) in halves.iter().enumerate() {
        out[at + 2 * i..at + 2 * i + 2].copy_from_slice(&half::f16::from_f32(*half).to_le_bytes());
    }
    out
}

/// Numbers that the formats' authors' own reader (`gguf` for Python) makes of the same bytes.
#[test]
fn formats_mean_what_their_authors_say() {
    let check = |kind: Kind, bytes: &[u8], within: f32, wanted: &[(usize, f32)]| {
        let expand = |b: Block| b.ints.map(|i| f32::from(i).mul_add(b.scale, b.offset));
        let got: Vec<f32> = kind.blocks(bytes).flat_map(expand).collect();
        for (at, want) in wanted {
            assert!(
                (got[*at] - want).abs() <= within,
                "{kind:?} {at}: {} and not {want}",
                got[*at]
            );
        }
    };
    let q4_0 = piece(18, 0, &[0.5]);
    check(
        Kind::Q4_0,
        &q4_0,
        0.0,
        &[(0, -1.5), (7, 0.0), (15, -4.0), (16, -1.5), (25, 1.0)],
    );
    let q4_1 = piece(20, 0, &[0.5, -2.0]);
    check(
        Kind::Q4_1,
        &q4_1,
        0.0,
        &[(0, 5.5), (7, -1.0), (15, 3.0), (16, 2.5), (31, 4.0)],
    );
    let q5_0 = piece(22, 0, &[0.5]);
    check(
        Kind::Q5_0,
        &q5_0,
        0.0,
        &[(0, 4.5), (7, -2.0), (15, -6.0), (16, 7.0), (25, -6.5)],
    );
    let q5_1 = piece(24, 0, &[0.5, -2.0]);
    check(
        Kind::Q5_1,
        &q5_1,
        0.0,
        &[(0, 7.5), (7, 9.0), (15, 13.0), (25, 10.0), (31, 0.5)],
    );
    let q4k = piece(144, 0, &[0.5, 0.25]);
    check(
        Kind::Q4K,
        &q4k,
        0.0,
        &[(0, 157.75), (32, 4.0), (100, 47.5), (190, 442.5), (255, 24.25)],
    );
    // Rounded: the largest of a block is at most 1,922, of which a half of 1/127 may be lost.
    let q6k = piece(210, 208, &[0.5]);
    check(
        Kind::Q6K,
        &q6k,
        7.6,
        &[
            (0, -715.5),
            (16, -216.0),
            (40, -304.5),
            (100, 1261.5),
            (130, 71.5),
            (255, -30.0),
        ],
    );
    let q8_0 = [&half::f16::from_f32(0.25).to_le_bytes()[..], &[0xff; 32]].concat();
    check(Kind::Q8_0, &q8_0, 0.0, &[(0, -0.25), (31, -0.25)]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]
    #[test]
    fn four_bits_in_memory_are_the_same_numbers(bytes in prop::collection::vec(any::<u8>(), 20 * 2 * 19), rows in 1_usize..30) {
        let mut bytes = bytes;
        for piece in bytes.chunks_exact_mut(20) {
            // Halves that are numbers.
            (piece[1], piece[3]) = (piece[1] & 0x3b, piece[3] & 0xbb);
        }
        let tensor = Tensor { kind: Kind::Q4_1, shape: vec![64, 19], bytes: &bytes };
        let matrix = Matrix::new("w", &tensor, 64, 19).unwrap();
        let x: Vec<f32> = (0..64 * rows).map(|i| (i % 23) as f32 * 0.1 - 1.0).collect();
        let got = matrix.multiply(&Rows::pack(&x, 64), &Threads::new(1).unwrap());
        for output in 0..19 {
            let blocks: Vec<Block> = Kind::Q4_1.blocks(&bytes[output * 40..][..40]).collect();
            let weights = blocks.iter().flat_map(|b| b.ints.map(|i| f32::from(i).mul_add(b.scale, b.offset)));
            let weights: Vec<f32> = weights.collect();
            for row in 0..rows {
                let want = x[row * 64..][..64].iter().zip(&weights).fold(0.0_f32, |sum, (x, w)| x.mul_add(*w, sum));
                prop_assert_eq!(got[row * 19 + output].to_bits(), want.to_bits());
            }
        }
    }
}

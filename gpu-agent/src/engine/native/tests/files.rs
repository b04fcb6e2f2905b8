//! Files that are not what they should be.

use super::super::{LoadError, Model};
use super::tiny::{File, VOCABULARY, whole, word};
use proptest::prelude::*;
use std::path::Path;

fn error(change: impl FnOnce(&mut File)) -> LoadError {
    let mut file = File::llama();
    change(&mut file);
    Model::read(&file.bytes()).unwrap_err()
}

#[test]
fn a_good_file_is_a_model() {
    let model = Model::read(&File::llama().bytes()).unwrap();
    assert_eq!(
        (model.vocabulary(), model.stop_tokens()),
        (VOCABULARY as usize, &[69][..])
    );
    assert_eq!(model.layout(64).page_bytes(), Ok(2 * 2 * 2 * 16 * 64 * 2));
}

#[test]
fn what_is_wrong_is_said() {
    let missing = Model::load(Path::new("/nowhere/model.gguf")).unwrap_err();
    assert!(missing.to_string().contains("make model"), "{missing}");
    assert!(matches!(Model::read(b"PK\x03\x04").unwrap_err(), LoadError::NotGguf(_)));
    let other = error(|f| f.set("general.architecture", word("qwen2")));
    assert!(matches!(other, LoadError::Architecture(name) if name == "qwen2"));
    let scaled = error(|f| f.set("llama.rope.scaling.type", word("yarn")));
    assert!(matches!(scaled, LoadError::Unsupported(_)));
    let none = error(|f| f.tensors.retain(|t| t.0 != "blk.1.ffn_up.weight"));
    assert!(matches!(none, LoadError::NoTensor(name) if name == "blk.1.ffn_up.weight"));
    let wide = error(|f| f.set("llama.feed_forward_length", whole(128)));
    assert!(matches!(wide, LoadError::Shape { .. }));
    for impossible in [0, u32::MAX] {
        let heads = error(|f| f.set("llama.attention.head_count", whole(impossible)));
        assert!(matches!(heads, LoadError::Metadata(_)));
    }
    let mut cut = File::llama().bytes();
    cut.truncate(cut.len() - 40);
    let short = Model::read(&cut).unwrap_err();
    assert!(
        matches!(&short, LoadError::Short(name) if name == "blk.1.ffn_down.weight"),
        "{short}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn damaged_files_are_errors_or_models_and_nothing_else(
        cut in 0_usize..20_000, changes in prop::collection::vec((0_usize..2_500, any::<u8>()), 0..6),
    ) {
        let mut bytes = File::llama().bytes();
        if cut < bytes.len() && cut % 2 == 0 {
            bytes.truncate(cut);
        }
        for (at, byte) in changes {
            if let Some(old) = bytes.get_mut(at) {
                *old = byte;
            }
        }
        let _ = Model::read(&bytes);
    }
}

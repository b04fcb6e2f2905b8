//! Bytes of others, damaged in every way: each decoder refuses or reads them, and nothing else happens. What the fuzzer finds goes into
//! `fuzz/corpus` and is tried here ever after.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use pinion_gpu_agent::world::{Cluster, Shape, in_virtual_time, prompt};
use pinion_schemas::messages::{self, CATALOGUE};
use pinion_schemas::wire;
use pinion_tests::decoders::{DECODERS, feed};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, TestRunner};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Damaged copies tried for each decoder.
const CASES: u32 = 400;

fn folder(decoder: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus")).join(decoder)
}

/// Examples for a decoder: its corpus, in the order of names.
fn corpus(decoder: &str) -> Vec<Vec<u8>> {
    let files = fs::read_dir(folder(decoder)).unwrap();
    let mut paths: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

/// One frame of each kind that a small cluster sends, the shortest: one with too little room, a second control node, and lost workers.
fn recorded() -> BTreeMap<u16, Vec<u8>> {
    let frames = Arc::new(Mutex::new(BTreeMap::<u16, Vec<u8>>::new()));
    let heard = frames.clone();
    in_virtual_time(async move {
        let mut shape = Shape::default();
        shape.engine.device_pages = 100;
        let mut cluster = Cluster::start(shape).await.unwrap();
        let mut all = cluster.client.subscribe(">", None).await.unwrap();
        tokio::spawn(async move {
            while let Some(message) = all.next().await {
                let frame = message.payload.to_vec();
                if let Some(id) = wire::schema_of(&frame) {
                    let mut heard = heard.lock().unwrap();
                    if heard.get(&id).is_none_or(|known| known.len() > frame.len()) {
                        heard.insert(id, frame);
                    }
                }
            }
        });
        cluster.control("c1", 1).await.unwrap();
        for turn in 1..4 {
            let turns = (0..8).map(|s| cluster.submit(&format!("s{s}"), prompt(s, 300 * turn), 20));
            let turns = tokio::spawn(futures::future::join_all(turns));
            tokio::time::sleep(Duration::from_millis(50)).await;
            let _ = cluster.kill(&format!("d{turn}"));
            turns.await.unwrap();
        }
    });
    std::mem::take(&mut *frames.lock().unwrap())
}

#[derive(Clone, Debug)]
enum Damage {
    Byte(Index, u8),
    Bit(Index, u8),
    Cut(Index),
    Drop(Index, usize),
    Repeat(Index, usize),
    /// A number that is often at an edge, in four or eight bytes.
    Number(Index, u64, bool),
    /// Goes on as another example does.
    Splice(Index, Index),
}

fn damage() -> impl Strategy<Value = Damage> {
    let edge = prop_oneof![
        Just(0),
        Just(1),
        Just(u64::MAX),
        Just(u64::MAX >> 1),
        Just(1 << 31),
        Just(1 << 20),
        any::<u64>()
    ];
    prop_oneof![
        4 => (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Damage::Byte(at, byte)),
        4 => (any::<Index>(), 0_u8..8).prop_map(|(at, bit)| Damage::Bit(at, bit)),
        1 => any::<Index>().prop_map(Damage::Cut),
        1 => (any::<Index>(), 1_usize..40).prop_map(|(at, n)| Damage::Drop(at, n)),
        1 => (any::<Index>(), 1_usize..40).prop_map(|(at, n)| Damage::Repeat(at, n)),
        4 => (any::<Index>(), edge, any::<bool>()).prop_map(|(at, n, long)| Damage::Number(at, n, long)),
        1 => (any::<Index>(), any::<Index>()).prop_map(|(at, other)| Damage::Splice(at, other)),
    ]
}

fn damaged(bytes: &mut Vec<u8>, damage: &Damage, examples: &[Vec<u8>]) {
    if bytes.is_empty() {
        return;
    }
    let end = |at: usize, n: usize, len: usize| (at + n).min(len);
    match damage {
        Damage::Byte(at, byte) => *at.get_mut(bytes) = *byte,
        Damage::Bit(at, bit) => *at.get_mut(bytes) ^= 1 << bit,
        Damage::Cut(at) => bytes.truncate(at.index(bytes.len())),
        Damage::Drop(at, n) => {
            let at = at.index(bytes.len());
            bytes.drain(at..end(at, *n, bytes.len()));
        }
        Damage::Repeat(at, n) => {
            let at = at.index(bytes.len());
            let again = bytes[at..end(at, *n, bytes.len())].to_vec();
            bytes.splice(at..at, again);
        }
        Damage::Number(at, number, long) => {
            let at = at.index(bytes.len());
            let to = end(at, if *long { 8 } else { 4 }, bytes.len());
            bytes[at..to].copy_from_slice(&number.to_le_bytes()[..to - at]);
        }
        Damage::Splice(at, other) => {
            let (at, other) = (at.index(bytes.len()), other.get(examples));
            bytes.truncate(at);
            bytes.extend(other.iter().skip(at));
        }
    }
}

#[test]
fn damaged_bytes_are_refused_or_read() {
    let frames = recorded();
    for decoder in &DECODERS {
        let mut examples = corpus(decoder.name);
        if decoder.name == "wire" {
            examples.extend(frames.values().cloned());
        }
        assert!(examples.len() > 1, "{}: no examples", decoder.name);
        for example in &examples {
            feed(decoder.name, example);
        }
        let cases = (any::<Index>(), prop::collection::vec(damage(), 0..7));
        let config = Config {
            failure_persistence: None,
            ..Config::with_cases(CASES)
        };
        let run = TestRunner::new(config).run(&cases, |(which, all)| {
            let mut bytes = which.get(&examples).clone();
            for one in &all {
                damaged(&mut bytes, one, &examples);
            }
            feed(decoder.name, &bytes);
            Ok(())
        });
        run.unwrap_or_else(|error| panic!("{}: {error}", decoder.name));
    }
}

/// What is damaged is worth something: most messages are among it, and all are read when they are whole.
#[test]
fn most_messages_are_recorded_and_read() {
    let frames = recorded();
    for (id, frame) in &frames {
        assert!(messages::check(frame).is_ok(), "schema {id}");
    }
    let missing: Vec<_> = CATALOGUE
        .iter()
        .filter(|m| !frames.contains_key(&m.0))
        .map(|m| m.2)
        .collect();
    assert!(frames.len() * 2 > CATALOGUE.len(), "missing: {missing:?}");
}

/// Writes the recorded frames where the fuzzer begins: `cargo test -p pinion-tests --test hostile -- --ignored`.
#[test]
#[ignore = "writes examples for the fuzzer"]
fn write_recorded_frames() {
    for (id, frame) in recorded() {
        fs::write(folder("wire").join(format!("schema-{id}")), frame).unwrap();
    }
}

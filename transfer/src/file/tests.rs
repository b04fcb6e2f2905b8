//! Pages survive what may happen to a file, or are lost; none is ever another one.

use super::record::{HEADER_BYTES, RECORD_BYTES};
use super::*;
use crate::pool::Pool;
use crate::testing::{layout, page, pool};
use proptest::prelude::*;
use std::fs;

/// Bytes of a file with so many slots of one block each.
fn bytes(slots: u64) -> u64 {
    BLOCK + (slots * RECORD_BYTES as u64).next_multiple_of(BLOCK) + slots * BLOCK
}

/// A file that nobody else uses, removed in the end.
struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("pinion-file-{}-{number}.kv", std::process::id()));
        let _ = fs::remove_file(&path);
        Self(path)
    }

    fn open(&self, slots: u64) -> (FileTier, Vec<Found>) {
        FileTier::open(&self.0, &layout(), bytes(slots)).unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn name(n: u8) -> PageName {
    PageName {
        name: PageHash([n; 32]),
        parent: n.checked_sub(1).map(|p| PageHash([p; 32])),
    }
}

fn write(tier: &FileTier, pool: &Pool, n: u8, seed: u8) -> FilePage {
    let slot = tier.take().expect("no free slot");
    slot.write(name(n), &page(pool, seed), &mut tier.buffer()).unwrap()
}

/// The page's bytes; none if it is damaged.
fn read(tier: &FileTier, pool: &Pool, page: &FilePage) -> Option<Vec<u8>> {
    let slot = pool.take(1).unwrap().remove(0);
    match page.read(slot, &mut tier.buffer()) {
        Ok(page) => Some(page.to_vec()),
        Err((_, ReadError::Corrupt)) => None,
        Err((_, error)) => panic!("{error}"),
    }
}

#[test]
fn a_closed_file_offers_its_pages_again() {
    let (place, pool) = (Place::new(), pool(4));
    let (tier, found) = place.open(5);
    assert!(found.is_empty() && tier.capacity() == 5);
    let pages: Vec<FilePage> = (0..3).map(|n| write(&tier, &pool, n, n)).collect();
    assert_eq!((tier.usage().free, tier.usage().pages), (2, 3));
    drop(pages);
    assert_eq!(tier.usage().free, 5);
    // Its slot is used again, and what was in the others is still there.
    write(&tier, &pool, 7, 7);
    drop(tier);
    let (tier, found) = place.open(5);
    let names: Vec<PageName> = found.iter().map(|f| f.name).collect();
    assert_eq!(names, [name(0), name(1), name(7)]);
    for (found, seed) in found.iter().zip([0, 1, 7]) {
        let bytes = read(&tier, &pool, &found.page).unwrap();
        assert_eq!(bytes, page(&pool, seed).to_vec());
    }
    assert_eq!((tier.usage().free, tier.usage().pages), (2, 3));
    assert_eq!(fs::metadata(&place.0).unwrap().len(), bytes(5), "it is bounded");
    drop(found);
    assert_eq!((tier.usage().free, pool.usage().free), (5, 4));
}

#[test]
fn a_file_has_one_owner() {
    let place = Place::new();
    let (tier, _) = place.open(2);
    let slot = tier.take();
    let again = || FileTier::open(&place.0, &layout(), bytes(2));
    assert!(matches!(again(), Err(FileError::Locked(path)) if path == place.0));
    drop(tier);
    assert!(again().is_err(), "a slot of it is still being written");
    drop(slot);
    assert!(again().is_ok());
}

#[test]
fn another_kind_of_file_is_left_alone_and_an_older_one_of_ours_is_emptied() {
    let (place, pool) = (Place::new(), pool(1));
    fs::write(&place.0, vec![7; 10_000]).unwrap();
    let opened = FileTier::open(&place.0, &layout(), bytes(2));
    assert!(matches!(opened, Err(FileError::Foreign(_))));
    assert_eq!(fs::read(&place.0).unwrap(), vec![7; 10_000]);
    fs::write(&place.0, b"short").unwrap();
    assert!(matches!(
        FileTier::open(&place.0, &layout(), bytes(2)),
        Err(FileError::Foreign(_))
    ));
    fs::remove_file(&place.0).unwrap();
    let (tier, _) = place.open(2);
    write(&tier, &pool, 0, 0);
    drop(tier);
    let other = Layout { model: 2, ..layout() };
    assert_eq!(FileTier::open(&place.0, &other, bytes(2)).unwrap().1.len(), 0);
    let (tier, found) = place.open(2);
    assert!(found.is_empty(), "the other model has emptied it");
    write(&tier, &pool, 0, 0);
    drop(tier);
    assert_eq!(place.open(3).1.len(), 0, "and another size does");
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let place = Place::new();
    for (bytes, pages) in [
        (0, 0),
        (bytes(1) - 1, 0),
        (u64::MAX, u64::MAX / (BLOCK + RECORD_BYTES as u64)),
    ] {
        let error = FileTier::open(&place.0, &layout(), bytes).unwrap_err();
        assert!(
            matches!(&error, FileError::Size { pages: p, .. } if *p <= pages),
            "{error}"
        );
    }
    assert!(!place.0.exists());
}

/// What a crash leaves of a write.
#[derive(Clone, Copy, Debug)]
enum Left {
    All,
    Nothing,
    /// Only the first bytes, or only the last, in per mille.
    First(u16),
    Last(u16),
}

fn left() -> impl Strategy<Value = Left> {
    prop_oneof![
        6 => Just(Left::All),
        2 => Just(Left::Nothing),
        1 => (0_u16..1_000).prop_map(Left::First),
        1 => (0_u16..1_000).prop_map(Left::Last),
    ]
}

/// Writes what is left of each write into the file, in the order of `moments`: a power failure keeps no order.
fn play_back(path: &Path, writes: &[(u64, Vec<u8>)], left: &[Left], moments: &[u64]) {
    use std::os::unix::fs::FileExt as _;
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    let mut order: Vec<usize> = (0..writes.len()).collect();
    order.sort_by_key(|i| moments[*i % moments.len()]);
    for i in order {
        let ((at, bytes), cut) = (&writes[i], |part: u16| writes[i].1.len() * usize::from(part) / 1_000);
        let range = match left[i % left.len()] {
            Left::All => 0..bytes.len(),
            Left::Nothing => 0..0,
            Left::First(part) => 0..cut(part),
            Left::Last(part) => cut(part)..bytes.len(),
        };
        file.write_all_at(&bytes[range.clone()], at + range.start as u64)
            .unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Pages are written and dropped; then there is a crash after any write, which loses, tears and reorders some of the writes
    /// before it, and bytes are flipped. What the file then offers is right or known to be damaged, and the books add up.
    #[test]
    fn whatever_happens_a_page_is_right_or_lost(
        steps in prop::collection::vec((0_u8..6, any::<bool>()), 1..24),
        crash in 0_usize..80, left in prop::collection::vec(left(), 1..12), moments in prop::collection::vec(0_u64..3, 1..12),
        flips in prop::collection::vec((any::<u32>(), 1_u8..=255), 0..4), killed in any::<bool>(),
    ) {
        const SLOTS: u64 = 4;
        let (place, pool) = (Place::new(), pool(2));
        let (tier, _) = place.open(SLOTS);
        let mut held: Vec<(u8, FilePage)> = Vec::new();
        for (n, drops) in steps {
            // The bytes of a page follow from its name, as they do in an engine.
            if drops || held.len() as u64 == SLOTS {
                held.drain(..1.min(held.len()));
            } else {
                held.push((n, write(&tier, &pool, n, n)));
            }
            let usage = tier.usage();
            prop_assert_eq!(usage.free + usage.pages + usage.writing, SLOTS as u32);
            prop_assert_eq!(usage.pages as usize, held.len());
        }
        let mut writes = std::mem::take(&mut *tier.0.disk.written.lock().unwrap());
        drop((held, tier));

        let after = Place::new();
        drop(after.open(SLOTS));
        writes.truncate(crash);
        if killed {
            // Nothing is lost but a part of the last write.
            let last = left[0];
            let all = [vec![Left::All; writes.len().saturating_sub(1)], vec![last]].concat();
            play_back(&after.0, &writes, &all, &[0]);
        } else {
            play_back(&after.0, &writes, &left, &moments);
        }
        let mut file = fs::read(&after.0).unwrap();
        if !killed {
            for (at, flip) in flips {
                // The header is not what this is about: a damaged one makes the file foreign or empty.
                let body = file.len() - HEADER_BYTES;
                file[HEADER_BYTES + at as usize % body] ^= flip;
            }
            fs::write(&after.0, &file).unwrap();
        }

        let (tier, found) = after.open(SLOTS);
        let usage = tier.usage();
        prop_assert_eq!((usage.pages as usize, usage.writing), (found.len(), 0));
        prop_assert_eq!(usage.free + usage.pages, SLOTS as u32);
        for Found { name: told, page: held } in &found {
            let n = told.name.0[0];
            prop_assert_eq!(*told, name(n), "a name that was never written");
            match read(&tier, &pool, held) {
                Some(bytes) => prop_assert_eq!(bytes, page(&pool, n).to_vec(), "a wrong page"),
                None => prop_assert!(!killed, "a killed process leaves no damaged page"),
            }
        }
        // It goes on as a file like any other.
        drop(found);
        let pages: Vec<FilePage> = (0..SLOTS as u8).map(|n| write(&tier, &pool, n, n)).collect();
        prop_assert!(tier.take().is_none());
        for (n, held) in (0..).zip(&pages) {
            prop_assert_eq!(read(&tier, &pool, held), Some(page(&pool, n).to_vec()));
        }
    }
}

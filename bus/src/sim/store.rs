//! The simulated key-value store: revisions grow over a bucket, deletions leave a revision, a crash may take writes
//! back.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;

/// Key-value writes that a restart can take back at most.
const JOURNAL_MAX: usize = 1_024;
#[derive(Clone)]
struct Record {
    revision: u64,
    value: Option<Bytes>,
}

#[derive(Default)]
struct Bucket {
    revision: u64,
    records: BTreeMap<String, Record>,
}

#[derive(Default)]
pub(super) struct KvStore {
    buckets: BTreeMap<String, Bucket>,
    /// The latest writes, with what they replaced.
    journal: VecDeque<(String, String, Option<Record>)>,
}

impl KvStore {
    /// Takes back the last `writes`, also their revisions, which will be given again.
    pub(super) fn lose(&mut self, writes: usize) {
        for _ in 0..writes {
            let Some((bucket, key, before)) = self.journal.pop_back() else {
                break;
            };
            let bucket = self.buckets.entry(bucket).or_default();
            bucket.revision -= 1;
            match before {
                Some(record) => bucket.records.insert(key, record),
                None => bucket.records.remove(&key),
            };
        }
        self.journal.clear();
    }

    /// The last revision of a key (0: never written) and its value (none: never written, or deleted).
    pub(super) fn last(&self, bucket: &str, key: &str) -> (u64, Option<Bytes>) {
        let record = self.buckets.get(bucket).and_then(|bucket| bucket.records.get(key));
        record.map_or((0, None), |record| (record.revision, record.value.clone()))
    }

    pub(super) fn write(&mut self, bucket: &str, key: &str, value: Option<Bytes>) -> u64 {
        let entry = self.buckets.entry(bucket.to_owned()).or_default();
        entry.revision += 1;
        let revision = entry.revision;
        let before = entry.records.insert(key.to_owned(), Record { revision, value });
        self.journal.push_back((bucket.to_owned(), key.to_owned(), before));
        if self.journal.len() > JOURNAL_MAX {
            self.journal.pop_front();
        }
        revision
    }

    pub(super) fn keys(&self, bucket: &str, prefix: &str) -> Vec<(String, u64)> {
        let records = self.buckets.get(bucket).map(|bucket| &bucket.records);
        let from = records
            .into_iter()
            .flat_map(|records| records.range(prefix.to_owned()..));
        from.take_while(|(key, _)| key.starts_with(prefix))
            .filter(|(_, record)| record.value.is_some())
            .map(|(key, record)| (key.clone(), record.revision))
            .collect()
    }
}

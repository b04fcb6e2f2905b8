//! A worker's residency events: dense sequence numbers, so that a router notices what it lost and asks for a snapshot.

use crate::effect::Effects;
use crate::engine::{Engine, EngineOutput};
use pinion_bus::Message;
use pinion_schemas::messages::{PagesEvicted, PagesStored, ResidencySnapshot, SnapshotAsk};
use pinion_schemas::{Epoch, PageHash, WorkerId};

/// Pages in one message: half of the bus's limit.
pub const PAGES_PER_MESSAGE: usize = 16_000;

/// Publishes what becomes resident and what goes, in order.
pub struct ResidencyFeed {
    subject: String,
    worker: WorkerId,
    epoch: Epoch,
    sequence: u64,
    /// Changes of one kind not yet published.
    stored: Vec<PageHash>,
    evicted: Vec<PageHash>,
}

impl ResidencyFeed {
    /// The feed of `worker` on `subject`.
    pub fn new(subject: String, worker: WorkerId, epoch: Epoch) -> Self {
        Self {
            subject,
            worker,
            epoch,
            sequence: 0,
            stored: Vec::new(),
            evicted: Vec::new(),
        }
    }

    /// Number of the last event published.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Takes the page changes among an engine's outputs; a run of one kind becomes one message.
    pub fn take(&mut self, output: &EngineOutput, out: &mut Effects) {
        match output {
            EngineOutput::Stored(page) => {
                self.flush_evicted(out);
                self.stored.push(*page);
            }
            EngineOutput::Evicted(page) => {
                self.flush_stored(out);
                self.evicted.push(*page);
            }
            EngineOutput::Token(..) | EngineOutput::Finished { .. } => {}
        }
    }

    /// Publishes what is left.
    pub fn flush(&mut self, out: &mut Effects) {
        self.flush_stored(out);
        self.flush_evicted(out);
    }

    fn flush_stored(&mut self, out: &mut Effects) {
        for part in std::mem::take(&mut self.stored).chunks(PAGES_PER_MESSAGE) {
            self.sequence += 1;
            let (worker, epoch, sequence) = (self.worker.clone(), self.epoch, self.sequence);
            out.publish(
                self.subject.clone(),
                &PagesStored {
                    worker,
                    epoch,
                    sequence,
                    pages: part.to_vec(),
                },
            );
        }
    }

    fn flush_evicted(&mut self, out: &mut Effects) {
        for part in std::mem::take(&mut self.evicted).chunks(PAGES_PER_MESSAGE) {
            self.sequence += 1;
            let (worker, epoch, sequence) = (self.worker.clone(), self.epoch, self.sequence);
            out.publish(
                self.subject.clone(),
                &PagesEvicted {
                    worker,
                    epoch,
                    sequence,
                    pages: part.to_vec(),
                },
            );
        }
    }

    /// Answers one part of a snapshot. A reader that sees the sequence move between two parts starts again.
    pub fn answer(&self, engine: &impl Engine, ask: &SnapshotAsk, message: &Message, out: &mut Effects) {
        let all = engine.pages();
        let rest = all.get(ask.skip as usize..).unwrap_or_default();
        let part = &rest[..rest.len().min(PAGES_PER_MESSAGE)];
        let (worker, epoch, sequence) = (self.worker.clone(), self.epoch, self.sequence);
        let more = part.len() < rest.len();
        out.respond(
            message,
            &ResidencySnapshot {
                worker,
                epoch,
                sequence,
                more,
                pages: part.to_vec(),
            },
        );
    }
}

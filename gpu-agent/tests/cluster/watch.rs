//! Somebody who hears all that passes on the bus and keeps [`Books`] of every D.
//!
//! The network of such a test has no latency, so this hears each message when it is sent and in the order in which it is sent.
//! A permit is over when its D says `Started`, `Reject` or `PermitExpired`, or is told `Abort`.

use crate::books::{Books, Budget};
use pinion_bus::Message;
use pinion_gpu_agent::world::Cluster;
use pinion_schemas::messages::{Abort, Completed, Permit, PermitExpired, PermitQueued, Reject, Run, Started};
use pinion_schemas::subject::{Kind, parse};
use pinion_schemas::wire::{self, Schema};
use pinion_schemas::{Class, RequestId};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// What one D says of itself when asked, next to what the books say at that moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Permits out, by its own ledger.
    pub seeds: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Permits out, by the books.
    pub counted: usize,
}

/// A turn at a D.
struct Leg {
    worker: String,
    class: Class,
    context: usize,
}

/// What was heard so far.
pub struct Watch {
    budget: Budget,
    page_tokens: u64,
    page_bytes: u64,
    /// By D.
    pub books: BTreeMap<String, Books>,
    /// The D that was asked first, by request.
    pub first_asked: BTreeMap<RequestId, String>,
    /// By D: what it answered to `inspect`.
    pub samples: BTreeMap<String, Vec<Sample>>,
    /// Rejects heard.
    pub rejects: usize,
    /// Aborts heard.
    pub aborts: usize,
    /// The D that has a turn now.
    legs: BTreeMap<RequestId, Leg>,
    /// Answers that people asked for, by inbox: from which D.
    inspections: BTreeMap<String, String>,
}

impl Watch {
    /// Begins to listen to a cluster whose pages have this many tokens and bytes.
    pub async fn start(cluster: &Cluster, budget: Budget, page_tokens: u32, page_bytes: u64) -> Arc<Mutex<Self>> {
        let this = Arc::new(Mutex::new(Self {
            budget,
            page_tokens: u64::from(page_tokens),
            page_bytes,
            books: BTreeMap::new(),
            first_asked: BTreeMap::new(),
            samples: BTreeMap::new(),
            rejects: 0,
            aborts: 0,
            legs: BTreeMap::new(),
            inspections: BTreeMap::new(),
        }));
        let mut all = cluster.client.subscribe(">", None).await.unwrap();
        let watch = this.clone();
        tokio::spawn(async move {
            while let Some(message) = all.next().await {
                watch.lock().unwrap().hear(&message);
            }
        });
        this
    }

    fn books_of(&mut self, worker: &str) -> &mut Books {
        let budget = self.budget;
        self.books
            .entry(worker.to_owned())
            .or_insert_with(|| Books::new(budget))
    }

    fn hear(&mut self, message: &Message) {
        let bytes = &message.payload[..];
        if let Some(worker) = self.inspections.remove(&message.subject) {
            return self.sample(worker, std::str::from_utf8(bytes).unwrap());
        }
        let to = parse(&message.subject);
        let decode = to.as_ref().filter(|to| to.kind == Kind::Decode);
        let worker = decode.map(|to| to.id.to_owned());
        match (wire::schema_of(bytes), worker) {
            (Some(Run::ID), Some(worker)) => {
                let run: Run = wire::decode(bytes).unwrap();
                self.first_asked.entry(run.request).or_insert_with(|| worker.clone());
                let leg = Leg {
                    worker,
                    class: run.class,
                    context: run.tokens.len(),
                };
                self.legs.insert(run.request, leg);
            }
            (Some(PermitQueued::ID), _) => {
                let queued: PermitQueued = wire::decode(bytes).unwrap();
                let leg = &self.legs[&queued.request];
                let (worker, class) = (leg.worker.clone(), leg.class);
                self.books_of(&worker).queued(queued.request, class, queued.position);
            }
            (Some(Permit::ID), _) => {
                let permit: Permit = wire::decode(bytes).unwrap();
                let leg = &self.legs[&permit.request];
                // Only what the D misses moves.
                let pages = (leg.context as u64).div_ceil(self.page_tokens) - u64::from(permit.resident_pages);
                let (worker, class, bytes) = (leg.worker.clone(), leg.class, pages * self.page_bytes);
                self.books_of(&worker).granted(permit.request, class, bytes);
            }
            (Some(Started::ID), _) => self.over(wire::decode::<Started>(bytes).unwrap().request),
            (Some(Completed::ID), _) => self.over(wire::decode::<Completed>(bytes).unwrap().request),
            (Some(PermitExpired::ID), _) => self.over(wire::decode::<PermitExpired>(bytes).unwrap().request),
            (Some(Reject::ID), _) => {
                self.rejects += 1;
                self.over(wire::decode::<Reject>(bytes).unwrap().request);
            }
            (Some(Abort::ID), Some(_)) => {
                self.aborts += 1;
                self.over(wire::decode::<Abort>(bytes).unwrap().request);
            }
            (None, Some(worker)) if to.is_some_and(|to| to.verb == Some("inspect")) => {
                self.inspections
                    .extend(message.reply.clone().map(|inbox| (inbox, worker)));
            }
            _ => {}
        }
    }

    fn over(&mut self, request: RequestId) {
        if let Some(worker) = self.legs.get(&request).map(|leg| leg.worker.clone()) {
            self.books_of(&worker).over(request);
        }
    }

    fn sample(&mut self, worker: String, view: &str) {
        let number = |field: &str| -> u64 {
            let (_, rest) = view.split_once(&format!("\"{field}\":")).unwrap();
            let digits = rest.split(|c: char| !c.is_ascii_digit()).next().unwrap();
            digits.parse().unwrap()
        };
        let sample = Sample {
            // Only a permit that stands says when it was granted.
            seeds: view.matches("\"granted\":").count(),
            bytes: number("pending_bytes"),
            counted: self.books_of(&worker).seeds(),
        };
        self.samples.entry(worker).or_default().push(sample);
    }
}

//! What D→P sync costs a direct turn: two clusters of real processes, one with backups and one without, get the same turns, one
//! after the other, so that what else the machine does hits both. Each turn appends a page, which is synced while the next turn of
//! the session is already there.

use crate::table::{Row, Section, percentile};
use crate::turns::{Client, Cluster, Failure};
use std::time::Duration;

/// Turns of each cluster that count, and those before.
const TURNS: usize = 1_200;
const WARM: usize = 100;
/// Tokens of a session's first prompt, and of each append: a page.
const FIRST: usize = 2_000;
const APPEND: usize = 64;
const ANSWER: u32 = 4;
/// Turns of a session: then it begins anew, so that contexts stay alike.
const SESSION: usize = 50;

struct Side {
    _cluster: Cluster,
    client: Client,
    samples: Vec<Duration>,
}

impl Side {
    fn new(name: &str, settings: &str) -> Result<Self, Failure> {
        let cluster = Cluster::with(name, settings)?;
        let client = cluster.client()?;
        Ok(Self {
            _cluster: cluster,
            client,
            samples: Vec::new(),
        })
    }

    fn turn(&mut self, number: usize) -> Result<(), Failure> {
        let (session, turn) = (number / SESSION, number % SESSION);
        let length = FIRST + turn * APPEND;
        let letter = |i: usize| char::from(b'a' + ((i * 7 + session * 11 + i / 26 * session) % 26) as u8);
        let prompt: String = (0..length).map(letter).collect();
        let seen = self.client.turn(&format!("backup-{session}"), &prompt, ANSWER)?;
        if seen.path == "direct" && number >= WARM {
            self.samples.push(seen.first);
        }
        Ok(())
    }
}

/// Time to the first token of direct turns, with and without.
pub fn run() -> Result<Section, Failure> {
    eprintln!("backup: two clusters, {TURNS} turns each");
    let mut off = Side::new("off", "backups = \"off\"")?;
    let mut on = Side::new("on", "backups = \"last-p\"")?;
    for number in 0..TURNS + WARM {
        // Who comes first changes, so that being second is nobody's advantage.
        let (first, second) = if number % 2 == 0 {
            (&mut off, &mut on)
        } else {
            (&mut on, &mut off)
        };
        first.turn(number)?;
        second.turn(number)?;
    }
    let median = |side: &mut Side| {
        side.samples.sort_unstable();
        percentile(&side.samples, 0.5)
    };
    let (without, with) = (median(&mut off), median(&mut on));
    let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
    let direct = on.samples.len();
    Ok(Section {
        title: "What D→P sync costs a direct turn",
        how: vec![
            format!(
                "{direct} direct turns with backups and {} without, in turns; each appends and syncs a page",
                off.samples.len()
            ),
            "two clusters of real processes on one machine, simulated engines whose work takes no time".into(),
        ],
        rows: vec![
            Row::value("first token, backups off", "µs", micros(without)),
            Row::value("first token, backups last-p", "µs", micros(with)),
            Row::value("on over off", "x", micros(with) / micros(without)).goal(1.05, None),
        ],
    })
}

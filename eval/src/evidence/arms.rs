//! Arms: runs of one system, and what must be equal before arms are compared.

use super::EvidenceError;
use super::rows::{Run, io_error};
use crate::replay::TurnRecord;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// Least runs of an arm in a headline table (digest §4.1, M1).
pub const MIN_RUNS: usize = 3;

/// The runs of one system.
#[derive(Clone, Debug, PartialEq)]
pub struct Arm {
    /// Its name in tables.
    pub name: String,
    /// By seed.
    pub runs: Vec<Run>,
}

/// What a turn is in all arms: the run's seed and its place among runs of that seed, the session, and the turn.
pub type Key<'a> = (u64, usize, &'a str, usize);

impl Arm {
    /// Every row with the run it is of.
    pub fn rows(&self) -> impl Iterator<Item = (&Run, &TurnRecord)> {
        self.runs
            .iter()
            .flat_map(|run| run.rows.iter().map(move |row| (run, row)))
    }

    /// Every row by what it is in all arms.
    pub fn keyed(&self) -> HashMap<Key<'_>, (&Run, &TurnRecord)> {
        let mut seen: HashMap<u64, usize> = HashMap::new();
        let mut keyed = HashMap::new();
        for run in &self.runs {
            let seen = seen.entry(run.head.seed).or_insert(0);
            for row in &run.rows {
                keyed.insert((run.head.seed, *seen, row.session.as_str(), row.turn), (run, row));
            }
            *seen += 1;
        }
        keyed
    }
}

/// Sorts runs into arms, by name.
pub fn group(runs: Vec<Run>) -> Vec<Arm> {
    let mut arms: BTreeMap<String, Vec<Run>> = BTreeMap::new();
    for run in runs {
        arms.entry(run.head.arm.clone()).or_default().push(run);
    }
    arms.into_iter()
        .map(|(name, mut runs)| {
            runs.sort_by_key(|run| run.head.seed);
            Arm { name, runs }
        })
        .collect()
}

/// All runs of a file, or of the `.jsonl` files of a folder.
///
/// # Errors
/// If one cannot be read, or there is none.
pub fn load(place: &Path) -> Result<Vec<Arm>, EvidenceError> {
    let files = if place.is_dir() {
        let entries = std::fs::read_dir(place).map_err(|source| io_error(place, source))?;
        let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        files.retain(|file| file.extension().is_some_and(|e| e == "jsonl"));
        files.sort();
        files
    } else {
        vec![place.to_owned()]
    };
    if files.is_empty() {
        return Err(EvidenceError::NoRows(place.to_owned()));
    }
    let runs = files.iter().map(|file| Run::read(file)).collect::<Result<_, _>>()?;
    Ok(group(runs))
}

/// The one arm of some files and folders.
///
/// # Errors
/// If there is none, or more than one.
pub fn load_one(places: &[PathBuf]) -> Result<Arm, EvidenceError> {
    let mut runs = Vec::new();
    for place in places {
        runs.extend(load(place)?.into_iter().flat_map(|arm| arm.runs));
    }
    let place = || places.first().cloned().unwrap_or_default();
    let mut arms = group(runs);
    match (arms.pop(), arms.is_empty()) {
        (Some(arm), true) => Ok(arm),
        (None, _) => Err(EvidenceError::NoRows(place())),
        (Some(last), false) => Err(EvidenceError::ManyArms {
            path: place(),
            arms: arms.into_iter().chain([last]).map(|arm| arm.name).collect(),
        }),
    }
}

/// Refuses arms that cannot be compared: with runs of other settings, or, unless it is a smoke test, with too few runs.
///
/// # Errors
/// What is wrong first.
pub fn check(arms: &[Arm], smoke: bool) -> Result<(), EvidenceError> {
    let mut runs = arms.iter().flat_map(|arm| &arm.runs);
    if let Some(first) = runs.next() {
        for run in runs {
            if let Some((setting, a_value, b_value)) = first.head.settings.difference(&run.head.settings) {
                let (a, b) = (first.name(), run.name());
                return Err(EvidenceError::Settings {
                    a,
                    b,
                    setting,
                    a_value,
                    b_value,
                });
            }
        }
    }
    match arms.iter().find(|arm| arm.runs.len() < MIN_RUNS) {
        Some(arm) if !smoke => Err(EvidenceError::TooFewRuns {
            arm: arm.name.clone(),
            runs: arm.runs.len(),
            needed: MIN_RUNS,
        }),
        _ => Ok(()),
    }
}

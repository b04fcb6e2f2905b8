//! What can be wrong with evidence.

use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// No table can be made.
#[derive(Debug, Error)]
pub enum EvidenceError {
    /// A file or folder cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A line of a file is not what it should be.
    #[error("{}, line {line}: {message}; write it again with pinion replay --out or pinion sim", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// No file of rows was found.
    #[error("{}: no rows here; give a .jsonl file that pinion replay --out or pinion sim wrote, or a folder of them", .0.display())]
    NoRows(PathBuf),
    /// A place that should hold one arm holds another number of them.
    #[error("{}: holds the arms {}, where one is compared; give their files, or use pinion report", path.display(), arms.join(", "))]
    ManyArms {
        /// The place.
        path: PathBuf,
        /// Their names.
        arms: Vec<String>,
    },
    /// No such arm.
    #[error("there is no arm {name}; there are {}", arms.join(", "))]
    NoArm {
        /// What was asked for.
        name: String,
        /// What there is.
        arms: Vec<String>,
    },
    /// Too few runs for a table that others will quote.
    #[error(
        "arm {arm} has {runs} run(s), and a headline table needs {needed}; play it with other seeds, \
         or ask for a smoke test with --smoke"
    )]
    TooFewRuns {
        /// The arm.
        arm: String,
        /// What it has.
        runs: usize,
        /// What is needed.
        needed: usize,
    },
    /// Two runs are not of the same experiment.
    #[error("{a} and {b} differ in {setting}: {a_value} and {b_value}; play both with the same settings")]
    Settings {
        /// A run, as arm and seed.
        a: String,
        /// Another one.
        b: String,
        /// In what they differ.
        setting: String,
        /// The first one's.
        a_value: String,
        /// The other one's.
        b_value: String,
    },
    /// Too few resamples for an interval.
    #[error("{given} resamples are too few: give at least {least}")]
    Resamples {
        /// Asked for.
        given: usize,
        /// Needed.
        least: usize,
    },
    /// Two arms have no turn in common.
    #[error("arms {candidate} and {baseline} have no turn in common; play the same trace with the same seeds")]
    NoPairs {
        /// One arm.
        candidate: String,
        /// The other.
        baseline: String,
    },
    /// The report cannot be written.
    #[error("the report's template: {0}")]
    Template(#[from] minijinja::Error),
    /// A picture cannot be drawn.
    #[error("a plot cannot be drawn: {0}")]
    Plot(String),
}

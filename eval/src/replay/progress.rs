//! News of a replay under way.

use super::TurnRecord;
use indicatif::{ProgressBar, ProgressStyle};

/// A turn has ended.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// The turn.
    pub record: &'a TurnRecord,
    /// Turns that have ended, this one included.
    pub done: usize,
    /// Turns there will be.
    pub total: usize,
    /// Turns that have failed.
    pub failed: usize,
}

/// A bar on standard error for [`super::replay`]; nothing is drawn where that is not a terminal.
pub fn bar() -> impl FnMut(&Progress<'_>) {
    let bar = ProgressBar::no_length();
    let style =
        ProgressStyle::with_template("{elapsed_precise} [{bar:30}] {pos}/{len} turns, {msg} (about {eta} left)");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    move |news| {
        bar.set_length(news.total as u64);
        bar.set_position(news.done as u64);
        bar.set_message(format!("{} failed", news.failed));
        if news.done == news.total {
            bar.finish_and_clear();
        }
    }
}

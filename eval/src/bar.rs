//! Progress bars on standard error; nothing is drawn where that is not a terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar over `length` things called `what`, which goes away when it is dropped.
pub fn bar(length: u64, what: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(&format!(
        "{{elapsed_precise}} [{{bar:30}}] {{pos}}/{{len}} {what} (about {{eta}} left)"
    ));
    ProgressBar::new(length).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// A bar over the bytes of a file of `length` bytes; a spinner if that is not known.
pub fn bytes(length: Option<u64>) -> ProgressBar {
    let (bar, template) = match length {
        Some(length) => (
            ProgressBar::new(length),
            "{elapsed_precise} [{bar:30}] {bytes}/{total_bytes} (about {eta} left)",
        ),
        None => (ProgressBar::new_spinner(), "{elapsed_precise} {spinner} {bytes}"),
    };
    let style = ProgressStyle::with_template(template);
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        .with_finish(indicatif::ProgressFinish::AndClear)
}

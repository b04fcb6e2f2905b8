//! I9: a page that an engine takes from another node holds what a page of that name must hold.

use super::{Checker, Found, Invariant};
use crate::observed::Observed;
use pinion_schemas::{Micros, PageHash};
use std::collections::HashMap;

/// See the module's text.
#[derive(Default)]
pub(super) struct Pages {
    right: HashMap<PageHash, u64>,
}

impl Checker for Pages {
    fn see(&mut self, at: Micros, seen: &Observed, out: &mut Found) {
        match seen {
            Observed::Begun { right, .. } => {
                let pages = right.names.iter().copied().zip(right.contents.iter().copied());
                self.right.extend(pages);
            }
            Observed::Imported { worker, name, content }
                if self.right.get(name).is_some_and(|right| right != content) =>
            {
                let what = format!("{worker} took a wrong page {name:?}");
                out.breach(Invariant::I9, at, what);
            }
            _ => {}
        }
    }
}

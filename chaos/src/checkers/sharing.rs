//! I11: no page goes that a running turn stands on, whoever else ends.

use super::{Checker, Found, Invariant};
use crate::observed::Observed;
use pinion_schemas::Micros;

/// See the module's text.
pub(super) struct Sharing;

impl Checker for Sharing {
    fn see(&mut self, at: Micros, seen: &Observed, out: &mut Found) {
        if let Observed::EvictedInUse { worker, request } = seen {
            out.breach(Invariant::I11, at, format!("{worker} evicted a page under {request}"));
        }
    }
}

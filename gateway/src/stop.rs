//! Stop texts: an answer ends before the first of them, also when it comes in pieces.

use aho_corasick::AhoCorasick;
use axum::http::StatusCode;

use crate::error::ApiError;
use crate::openai::TextOr;

/// Stop texts of one request.
const STOPS_MAX: usize = 4;
/// Bytes of one: as much of an answer may be held back.
const STOP_BYTES_MAX: usize = 1_024;
const FIELD: &str = "stop";

/// Lets through what is certain not to begin a stop text.
#[derive(Debug)]
pub(crate) struct Stop {
    /// None without stop texts: nothing waits then.
    finder: Option<AhoCorasick>,
    stops: Vec<String>,
    /// What may be the beginning of a stop text; shorter than the longest of them.
    held: String,
}

impl Stop {
    /// For what a request asks for.
    ///
    /// # Errors
    /// 400 for more than four texts, an empty one, or one of more than 1,024 bytes.
    pub(crate) fn new(asked: Option<TextOr<String>>) -> Result<Self, ApiError> {
        let stops = match asked {
            None => Vec::new(),
            Some(TextOr::Text(stop)) => vec![stop],
            Some(TextOr::List(stops)) => stops,
        };
        check(&stops)?;
        let finder = (!stops.is_empty()).then(|| AhoCorasick::new(&stops)).transpose();
        Ok(Self {
            // A few thousand bytes are far below the crate's limits.
            finder: finder
                .map_err(|error| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "stop_texts", error.to_string()))?,
            stops,
            held: String::new(),
        })
    }

    /// Takes the next piece of the answer and appends to `out` what is certain; true when a stop text is complete, which is
    /// the end. Of several, the one that is complete first counts, and of those the longest: how the answer was cut into
    /// pieces makes no difference.
    pub(crate) fn push(&mut self, piece: &str, out: &mut String) -> bool {
        let Some(finder) = &self.finder else {
            out.push_str(piece);
            return false;
        };
        self.held.push_str(piece);
        if let Some(found) = finder.find(&self.held) {
            self.held.truncate(found.start());
            out.push_str(&self.held);
            self.held.clear();
            return true;
        }
        let certain = self.held.len() - self.begun();
        out.extend(self.held.drain(..certain));
        false
    }

    /// The answer ends without a stop text: appends what still waits.
    pub(crate) fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }

    /// Bytes of the longest end of `held` that begins a stop text.
    fn begun(&self) -> usize {
        let held = self.held.as_bytes();
        let begins = |length: &usize| {
            let end = held.get(held.len() - length..).unwrap_or_default();
            self.stops.iter().any(|stop| stop.as_bytes().starts_with(end))
        };
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        // A stop text's first byte begins a character, and so such an end is at a character's boundary.
        (1..longest.min(held.len() + 1)).rev().find(begins).unwrap_or(0)
    }
}

fn check(stops: &[String]) -> Result<(), ApiError> {
    if stops.len() > STOPS_MAX {
        let message = format!("{} texts, at most {STOPS_MAX} are served: leave some out", stops.len());
        return Err(ApiError::field(FIELD, "invalid_value", message));
    }
    for (index, stop) in stops.iter().enumerate() {
        let field = if stops.len() == 1 {
            FIELD.to_owned()
        } else {
            format!("{FIELD}[{index}]")
        };
        if stop.is_empty() {
            let message = "an empty text would end every answer at once: leave it out";
            return Err(ApiError::field(&field, "invalid_value", message));
        }
        if stop.len() > STOP_BYTES_MAX {
            let message = format!("{} bytes, at most {STOP_BYTES_MAX} are served: shorten it", stop.len());
            return Err(ApiError::field(&field, "invalid_value", message));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stop(stops: &[String]) -> Stop {
        Stop::new(Some(TextOr::List(stops.to_vec()))).unwrap()
    }

    /// What comes out of these pieces, and whether a stop text ended it.
    fn run(stops: &[String], pieces: &[String]) -> (String, bool) {
        let (mut stop, mut out) = (stop(stops), String::new());
        for piece in pieces {
            if stop.push(piece, &mut out) {
                return (out, true);
            }
        }
        stop.finish(&mut out);
        (out, false)
    }

    /// The same from the whole text: the match that ends first, then the longest.
    fn plain(stops: &[String], text: &str) -> (String, bool) {
        let all = stops.iter().flat_map(|stop| {
            let begins = text.char_indices().filter(move |(at, _)| text[*at..].starts_with(stop));
            begins.map(move |(at, _)| (at + stop.len(), at))
        });
        all.min()
            .map_or((text.to_owned(), false), |(_, at)| (text[..at].to_owned(), true))
    }

    #[test]
    fn a_stop_text_in_pieces_is_never_shown() {
        let mut stop = stop(&["END.".to_owned()]);
        let mut said = |piece: &str| {
            let mut out = String::new();
            let over = stop.push(piece, &mut out);
            (out, over)
        };
        for (piece, out, over) in [
            ("a E", "a ", false),
            ("N", "", false),
            ("x", "ENx", false),
            ("ENEN", "EN", false),
            ("D", "", false),
            (". more", "", true),
        ] {
            assert_eq!(said(piece), (out.to_owned(), over), "{piece}");
        }
    }

    #[test]
    fn bad_lists_are_refused() {
        for bad in [
            vec![""],
            vec!["a", ""],
            vec!["a"; 5],
            vec![&"x".repeat(STOP_BYTES_MAX + 1)],
        ] {
            let list = bad.into_iter().map(str::to_owned).collect();
            assert_eq!(Stop::new(Some(TextOr::List(list))).unwrap_err().code, "invalid_value");
        }
    }

    proptest! {
        #[test]
        fn pieces_make_no_difference(
            stops in prop::collection::vec("[abé]{1,4}", 0..4), pieces in prop::collection::vec("[abé]{0,5}", 0..8),
        ) {
            prop_assert_eq!(run(&stops, &pieces), plain(&stops, &pieces.concat()));
        }

        #[test]
        fn no_more_waits_than_a_stop_text(stops in prop::collection::vec("[ab]{1,4}", 1..4), text in "[ab]{0,12}") {
            let (mut stop, mut out) = (stop(&stops), String::new());
            for c in text.chars() {
                if stop.push(&c.to_string(), &mut out) {
                    break;
                }
                prop_assert!(stop.held.len() < stops.iter().map(String::len).max().unwrap());
            }
        }
    }
}

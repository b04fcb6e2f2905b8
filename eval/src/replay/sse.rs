//! A parser of server-sent events (WHATWG HTML, section 9.2.6) that takes bytes in any pieces.
//!
//! Only `data` is kept; `event`, `id`, `retry` and comments are passed over.

/// Longest accepted line and longest accepted event, bytes.
pub const MAX_EVENT_BYTES: usize = 16 << 20;

/// A line or an event is longer than [`MAX_EVENT_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventTooLong;

/// The state between two pieces.
#[derive(Debug, Default)]
pub struct SseParser {
    line: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
    /// The last byte was a CR: a LF that follows belongs to it.
    after_cr: bool,
    /// The first line has been seen, so a byte order mark is none any more.
    started: bool,
}

impl SseParser {
    /// Takes the next bytes and calls `event` with the data of each event that they complete. An event that no empty
    /// line has ended is never given out.
    ///
    /// # Errors
    /// [`EventTooLong`]; the parser is of no use afterwards.
    pub fn push(&mut self, bytes: &[u8], mut event: impl FnMut(&[u8])) -> Result<(), EventTooLong> {
        for &byte in bytes {
            let after_cr = std::mem::replace(&mut self.after_cr, byte == b'\r');
            match byte {
                b'\n' if after_cr => {}
                b'\n' | b'\r' => self.end_line(&mut event)?,
                _ if self.line.len() >= MAX_EVENT_BYTES => return Err(EventTooLong),
                _ => self.line.push(byte),
            }
        }
        Ok(())
    }

    fn end_line(&mut self, event: &mut impl FnMut(&[u8])) -> Result<(), EventTooLong> {
        let whole = std::mem::take(&mut self.line);
        let mut line = whole.as_slice();
        if !std::mem::replace(&mut self.started, true) {
            line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line);
        }
        if line.is_empty() {
            if std::mem::take(&mut self.has_data) {
                event(&self.data);
                self.data.clear();
            }
        } else if let Some(value) = data_of(line) {
            if self.data.len() + value.len() > MAX_EVENT_BYTES {
                return Err(EventTooLong);
            }
            if std::mem::replace(&mut self.has_data, true) {
                self.data.push(b'\n');
            }
            self.data.extend_from_slice(value);
        }
        self.line = whole;
        self.line.clear();
        Ok(())
    }
}

/// The value of a `data` line.
fn data_of(line: &[u8]) -> Option<&[u8]> {
    match line.strip_prefix(b"data")? {
        [] => Some(&[]),
        [b':', b' ', value @ ..] | [b':', value @ ..] => Some(value),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<Vec<u8>> {
        let (mut parser, mut events) = (SseParser::default(), Vec::new());
        for piece in pieces {
            parser.push(piece, |e| events.push(e.to_vec())).unwrap();
        }
        events
    }

    #[test]
    fn the_forms_of_a_line() {
        let text =
            "\u{feff}data: a\r\n: comment\r\nevent: x\rdata:b\n\ndata\n\ndatax: no\n\ndata:  two\n\ndata: never ended";
        let events: Vec<&[u8]> = vec![b"a\nb", b"", b" two"];
        assert_eq!(parse([text.as_bytes()]), events);
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let mut parser = SseParser::default();
        let piece = vec![b'x'; MAX_EVENT_BYTES];
        assert_eq!(parser.push(&piece, |_| ()), Ok(()));
        assert_eq!(parser.push(b"x", |_| ()), Err(EventTooLong));
    }

    proptest! {
        /// Events come out as they went in, whatever the line ends and wherever the bytes are cut.
        #[test]
        fn cuts_do_not_matter(
            events in prop::collection::vec(prop::collection::vec("[ -~é∀]{0,12}", 1..4), 0..8),
            ends in prop::collection::vec(prop::sample::select(vec!["\n", "\r\n", "\r"]), 8),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
        ) {
            let mut text = String::new();
            for (lines, end) in events.iter().zip(&ends) {
                for line in lines {
                    text.extend(["data: ", line, end, ": ping", end]);
                }
                text += end;
            }
            let bytes = text.as_bytes();
            let mut at: Vec<usize> = cuts.iter().map(|c| c.index(bytes.len() + 1)).collect();
            at.extend([0, bytes.len()]);
            at.sort_unstable();
            let pieces = at.windows(2).map(|w| &bytes[w[0]..w[1]]);
            let wanted: Vec<Vec<u8>> = events.iter().map(|l| l.join("\n").into_bytes()).collect();
            prop_assert_eq!(parse(pieces), wanted);
        }

        /// No bytes make it panic, and cutting them differently gives the same events.
        #[test]
        fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200), cut in any::<prop::sample::Index>()) {
            let (a, b) = bytes.split_at(cut.index(bytes.len() + 1));
            prop_assert_eq!(parse([bytes.as_slice()]), parse([a, b]));
        }
    }
}

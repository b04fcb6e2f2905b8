//! W3C trace context, three fields and no dependency: the header `traceparent` of every message (design §7).

use std::fmt;

/// Name of the header; NATS headers keep their case, so there is one constant.
pub const HEADER: &str = "traceparent";

/// A `traceparent` of version 00.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// Trace id, never 0.
    pub trace: u128,
    /// Id of the parent span, never 0.
    pub span: u64,
    /// Whether the trace is recorded.
    pub sampled: bool,
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "00-{:032x}-{:016x}-{:02x}",
            self.trace,
            self.span,
            u8::from(self.sampled)
        )
    }
}

impl TraceContext {
    /// Parses a header. Later versions are read as version 00, as the W3C recommendation asks; anything malformed,
    /// an all-zero id included, is `None`: the receiver starts a trace of its own.
    pub fn parse(text: &str) -> Option<Self> {
        let lower_hex = |s: &str| s.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        let mut parts = text.split('-');
        let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let lengths_fit = version.len() == 2 && trace.len() == 32 && span.len() == 16 && flags.len() == 2;
        if !lengths_fit || ![version, trace, span, flags].into_iter().all(lower_hex) || version == "ff" {
            return None;
        }
        if version == "00" && parts.next().is_some() {
            return None;
        }
        let context = Self {
            trace: u128::from_str_radix(trace, 16).ok()?,
            span: u64::from_str_radix(span, 16).ok()?,
            sampled: u8::from_str_radix(flags, 16).ok()? & 1 == 1,
        };
        (context.trace != 0 && context.span != 0).then_some(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn malformed_headers_are_refused() {
        let zero_trace = format!("00-{}-{}-01", "0".repeat(32), "1".repeat(16));
        let upper = format!("00-{}-{}-01", "A".repeat(32), "1".repeat(16));
        let extra = format!("00-{}-{}-01-x", "a".repeat(32), "1".repeat(16));
        for bad in ["", "00", "00-1-2-3", &zero_trace, &upper, &extra] {
            assert_eq!(TraceContext::parse(bad), None, "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn printing_and_parsing_agree(trace in 1u128.., span in 1u64.., sampled: bool) {
            let context = TraceContext { trace, span, sampled };
            prop_assert_eq!(TraceContext::parse(&context.to_string()), Some(context));
        }

        #[test]
        fn any_text_is_handled(text in ".{0,80}") {
            let _ = TraceContext::parse(&text);
        }
    }
}

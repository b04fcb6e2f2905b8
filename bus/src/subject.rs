//! Which strings are subjects, patterns, queue groups and keys, and which subjects a pattern takes.

/// Longest subject, pattern or key: room for five names of [`pinion_schemas::limits::NAME_BYTES_MAX`] and a session
/// id.
pub const SUBJECT_BYTES_MAX: usize = 1_024;

fn is_token(token: &str) -> bool {
    !token.is_empty() && !token.contains(|c: char| c.is_whitespace() || c.is_control())
}

/// A subject to publish to: tokens between dots, no wildcards.
pub fn is_subject(subject: &str) -> bool {
    subject.len() <= SUBJECT_BYTES_MAX
        && subject
            .split('.')
            .all(|token| is_token(token) && token != "*" && token != ">")
}

/// A subject to listen on: `*` stands for one token, `>` as last token for one or more.
pub fn is_pattern(pattern: &str) -> bool {
    let body = pattern
        .strip_suffix(".>")
        .unwrap_or(if pattern == ">" { "*" } else { pattern });
    pattern.len() <= SUBJECT_BYTES_MAX && body.split('.').all(|token| is_token(token) && token != ">")
}

/// A queue group: one word.
pub fn is_queue(queue: &str) -> bool {
    queue.len() <= SUBJECT_BYTES_MAX && is_token(queue)
}

/// A key-value key: NATS allows letters, digits and `-/_=.`, no dot at either end and no two in a row.
pub fn is_key(key: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"-/_=.".contains(&b);
    is_subject(key) && key.bytes().all(allowed)
}

/// Does the pattern take this subject?
pub fn matches(pattern: &str, subject: &str) -> bool {
    let (mut wanted, mut tokens) = (pattern.split('.'), subject.split('.'));
    loop {
        match (wanted.next(), tokens.next()) {
            (None, None) => return true,
            (Some(">"), Some(_)) => return wanted.next().is_none(),
            (Some("*"), Some(_)) => {}
            (Some(want), Some(token)) if want == token => {}
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_take_what_nats_lets_them_take() {
        for (pattern, subject, taken) in [
            ("a.b", "a.b", true),
            ("a.b", "a", false),
            ("a", "a.b", false),
            ("a.*", "a.b", true),
            ("a.*", "a.b.c", false),
            ("*.b", "a.b", true),
            ("a.>", "a", false),
            ("a.>", "a.b.c", true),
            (">", "a", true),
            ("a.*.c", "a.b.c", true),
            ("a.*.c", "a.b.d", false),
        ] {
            assert_eq!(matches(pattern, subject), taken, "{pattern} on {subject}");
        }
    }

    #[test]
    fn malformed_names_are_refused() {
        assert!(
            is_subject("a.b-c.D_1") && is_pattern("a.*.>") && is_pattern(">") && is_pattern("*") && is_key("a/b.c=1")
        );
        for bad in ["", ".", "a.", ".a", "a..b", "a b", "a\r\n", "a.*", "a.>", ">"] {
            assert!(!is_subject(bad), "{bad:?}");
        }
        for bad in ["", "a.>.b", ">.a", "a..b", "a b", ".>", ">.>"] {
            assert!(!is_pattern(bad), "{bad:?}");
        }
        for bad in ["", "a.", "a b", "a*", "a>b", "a:b"] {
            assert!(!is_key(bad), "{bad:?}");
        }
    }
}

//! From messages to a template's text and from there to segments to encode, so that only what the *template* says can
//! be a control token.
//!
//! A user's text may spell `<|im_end|>`, and a template puts it into one text with the real ones. To tell them apart
//! afterwards, guards go into each content before the template sees it: characters that occur in no message. One goes to
//! either end, and one behind every character with which a control token begins. So no control token can be found in a
//! content or across its ends; those that are found are the template's. Then the guards are taken out again.
//! Placeholders instead of contents would do that, too, but templates trim contents and look into them.
//!
//! An assistant's content is a segment of its own, white space and all: its tokens are not merged with the template's text
//! around it. The model wrote them behind the template's text, and so they come back the same. All other contents are encoded together with the
//! text around them, as the model was trained on.

use aho_corasick::{AhoCorasick, MatchKind};

use super::template::Line;
use crate::tokenizer::{ChatError, Spoken};

/// All control tokens together, in bytes. A finder takes a few dozen times as much; models have a thousand such tokens at most.
const SPECIAL_BYTES_MAX: usize = 1 << 20;

/// What a template's text consists of.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Segment {
    /// A control token of the template.
    Control(u32),
    /// A text to encode, without control tokens.
    Text(String),
}

/// The tokens that are matched as a whole in templates.
pub(super) struct Specials {
    finder: AhoCorasick,
    ids: Vec<u32>,
    /// Characters with which they begin.
    first: Vec<char>,
}

impl Specials {
    /// Of texts and their ids. Texts of less than two characters are left out: no guard fits into them. Says what is wrong.
    pub(super) fn new(tokens: &[(String, u32)]) -> Result<Self, String> {
        let bytes: usize = tokens.iter().map(|(text, _)| text.len()).sum();
        if bytes > SPECIAL_BYTES_MAX {
            return Err(format!(
                "its control tokens have {bytes} bytes, at most {SPECIAL_BYTES_MAX}"
            ));
        }
        let tokens: Vec<_> = tokens
            .iter()
            .filter(|(text, _)| text.chars().nth(1).is_some())
            .collect();
        let mut first: Vec<char> = tokens.iter().filter_map(|(text, _)| text.chars().next()).collect();
        first.sort_unstable();
        first.dedup();
        Ok(Self {
            finder: AhoCorasick::builder()
                .match_kind(MatchKind::LeftmostLongest)
                .build(tokens.iter().map(|(text, _)| text))
                .map_err(|error| error.to_string())?,
            ids: tokens.iter().map(|(_, id)| *id).collect(),
            first,
        })
    }
}

/// The two characters of one conversation that occur in none of its messages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Guards {
    /// Is taken out, and what is around it goes together.
    join: char,
    /// Separates segments.
    wall: char,
}

impl Guards {
    pub(super) fn of(messages: &[Spoken]) -> Result<Self, ChatError> {
        let free = |c: &char| messages.iter().all(|message| !message.content.contains(*c));
        // Noncharacters, which no text should use; then the private plane, 32 of which is more than anybody needs.
        let mut free = ('\u{fdd0}'..='\u{fdef}')
            .chain('\u{100000}'..='\u{10001f}')
            .filter(free);
        match (free.next(), free.next()) {
            (Some(join), Some(wall)) => Ok(Self { join, wall }),
            _ => Err(ChatError::NoGuard),
        }
    }

    /// The messages with guards in their contents, and roles as templates know them.
    pub(super) fn lines<'a>(self, messages: &'a [Spoken], specials: &Specials) -> Result<Vec<Line<'a>>, ChatError> {
        messages.iter().map(|message| self.line(message, specials)).collect()
    }

    fn line<'a>(self, message: &'a Spoken, specials: &Specials) -> Result<Line<'a>, ChatError> {
        let plain = |c: char| c.is_alphanumeric() || c == '-' || c == '_';
        if message.role.is_empty() || !message.role.chars().all(plain) {
            return Err(ChatError::Role(message.role.clone()));
        }
        let role = match message.role.as_str() {
            "tools" | "developer" => "system",
            "function" => "tool",
            other => other,
        };
        let content = if role == "assistant" {
            self.walled(&message.content, specials)
        } else {
            self.guarded(&message.content, specials)
        };
        Ok(Line { role, content })
    }

    /// Guards stand inside the white space at the ends, so that templates can trim it.
    fn guarded(self, content: &str, specials: &Specials) -> String {
        let body = content.trim();
        let (before, after) = content.split_at(content.len() - content.trim_start().len());
        let after = after.get(body.len()..).unwrap_or_default();
        let mut out = String::with_capacity(content.len() + content.len() / 8 + 16);
        out.push_str(before);
        out.push(self.join);
        self.broken(body, specials, &mut out);
        out.push(self.join);
        out.push_str(after);
        out
    }

    /// Walls stand outside the white space: a template that trims answers would change what the model wrote, and the
    /// session's next prompt would depart from its last one.
    fn walled(self, content: &str, specials: &Specials) -> String {
        let mut out = String::with_capacity(content.len() + content.len() / 8 + 16);
        out.push(self.wall);
        self.broken(content, specials, &mut out);
        out.push(self.wall);
        out
    }

    /// With a guard behind every character with which a control token begins.
    fn broken(self, text: &str, specials: &Specials, out: &mut String) {
        for c in text.chars() {
            out.push(c);
            if specials.first.contains(&c) {
                out.push(self.join);
            }
        }
    }

    /// A template's text as segments, without guards.
    pub(super) fn segments(self, rendered: &str, specials: &Specials) -> Vec<Segment> {
        let mut segments = Vec::new();
        let mut at = 0;
        for found in specials.finder.find_iter(rendered) {
            self.texts(rendered.get(at..found.start()).unwrap_or_default(), &mut segments);
            let id = specials.ids.get(found.pattern().as_usize());
            segments.extend(id.map(|id| Segment::Control(*id)));
            at = found.end();
        }
        self.texts(rendered.get(at..).unwrap_or_default(), &mut segments);
        segments
    }

    fn texts(self, text: &str, out: &mut Vec<Segment>) {
        let parts = text.split(self.wall).map(|part| part.replace(self.join, ""));
        out.extend(parts.filter(|part| !part.is_empty()).map(Segment::Text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spoken(role: &str, content: &str) -> Spoken {
        Spoken {
            role: role.into(),
            content: content.into(),
        }
    }

    fn segments(messages: &[Spoken]) -> Vec<Segment> {
        let specials = Specials::new(&[("<|a|>".into(), 7), ("<|b|>".into(), 8), ("x".into(), 9)]).unwrap();
        let guards = Guards::of(messages).unwrap();
        let lines = guards.lines(messages, &specials).unwrap();
        // The hardest template: half a control token on either side of a content.
        let rendered: Vec<_> = lines.iter().map(|line| format!("<|a|>y<|{}|>", line.content)).collect();
        guards.segments(&rendered.concat(), &specials)
    }

    #[test]
    fn control_tokens_are_the_templates_alone() {
        let text = |text: &str| Segment::Text(text.into());
        let user = |content: &str| segments(&[spoken("user", content)]);
        for content in [
            "",
            "a",
            "a|>",
            "<|a",
            "<|a|>",
            "<<|a|>|b|>",
            " <|a|> ",
            "x\u{fdd0}\u{fdd1}<|b|>",
        ] {
            assert_eq!(
                user(content),
                [Segment::Control(7), text(&format!("y<|{content}|>"))],
                "{content}"
            );
        }
        // Two messages side by side do not make one, either.
        let two = segments(&[spoken("user", "<|a|"), spoken("tool", ">")]);
        assert_eq!(
            two,
            [
                Segment::Control(7),
                text("y<|<|a||>"),
                Segment::Control(7),
                text("y<|>|>")
            ]
        );
    }

    #[test]
    fn an_answer_is_a_segment_of_its_own() {
        let text = |text: &str| Segment::Text(text.into());
        for answer in ["so <|b|>", "\n so \n", "\n"] {
            let got = segments(&[spoken("assistant", answer)]);
            assert_eq!(got, [Segment::Control(7), text("y<|"), text(answer), text("|>")]);
        }
    }

    #[test]
    fn roles_say_nothing_else() {
        let specials = Specials::new(&[]).unwrap();
        let bad = [spoken("user<|a|>", "")];
        let guards = Guards::of(&bad).unwrap();
        assert!(matches!(guards.lines(&bad, &specials), Err(ChatError::Role(_))));
        let all: String = ('\u{fdd0}'..='\u{fdef}').chain('\u{100000}'..='\u{10001f}').collect();
        assert!(matches!(Guards::of(&[spoken("user", &all)]), Err(ChatError::NoGuard)));
    }
}

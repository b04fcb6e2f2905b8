//! The model's chat template, which is Jinja as Hugging Face means it: Python's string methods and separators,
//! `raise_exception`, `strftime_now`, `tojson`.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind, context};
use serde::Serialize as _;

use crate::tokenizer::ChatError;

/// Longest template accepted, in bytes. Real ones have up to 20,000.
const SOURCE_BYTES_MAX: usize = 256 << 10;
/// What a rendering may spend, in instructions; bytes written cost, too. A few dozen a message are usual.
const FUEL: u64 = 20_000_000;
const NAME: &str = "chat";

/// A message as the template reads it.
pub(super) struct Line<'a> {
    pub(super) role: &'a str,
    pub(super) content: String,
}

/// A compiled template.
pub(super) struct Template {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

impl Template {
    /// Compiles a template; `bos` and `eos` are what it reads as `bos_token` and `eos_token`.
    pub(super) fn new(source: &str, bos: &str, eos: &str) -> Result<Self, Error> {
        if source.len() > SOURCE_BYTES_MAX {
            let message = format!("{} bytes, at most {SOURCE_BYTES_MAX} are accepted", source.len());
            return Err(Error::new(ErrorKind::SyntaxError, message));
        }
        let mut environment = Environment::new();
        // As `transformers` sets up Jinja.
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_fuel(Some(FUEL));
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |format: String| strftime(&format, unix_days()));
        environment.add_filter("tojson", to_json);
        environment.add_template_owned(NAME, source.to_owned())?;
        Ok(Self {
            environment,
            bos: bos.to_owned(),
            eos: eos.to_owned(),
        })
    }

    /// The text of a conversation, up to where the assistant speaks next.
    pub(super) fn render(&self, lines: &[Line<'_>]) -> Result<String, ChatError> {
        let message = |line: &Line<'_>| context! { role => line.role, content => &line.content };
        let messages: Vec<Value> = lines.iter().map(message).collect();
        let rendered = self.environment.get_template(NAME).and_then(|template| {
            template.render(context! {
                messages,
                add_generation_prompt => true,
                bos_token => &self.bos,
                eos_token => &self.eos,
            })
        });
        rendered.map_err(|error| ChatError::Template(error.to_string()))
    }
}

#[allow(clippy::needless_pass_by_value, reason = "filters take their arguments by value")]
/// JSON with Python's separators, and with `indent` over several lines.
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Python's other options change nothing that is certain of being honoured here.
    let _: (Option<bool>, Option<bool>) = (options.get("ensure_ascii")?, options.get("sort_keys")?);
    options.assert_all_used()?;
    let mut out = Vec::new();
    let written = match indent {
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, Spaced)),
        Some(width) => {
            let indent = " ".repeat(width.min(16));
            let pretty = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, pretty))
        }
    };
    let bad = |error: &dyn std::fmt::Display| Error::new(ErrorKind::BadSerialization, error.to_string());
    written.map_err(|error| bad(&error))?;
    String::from_utf8(out).map_err(|error| bad(&error))
}

/// `, ` and `: `, as Python writes JSON.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: std::io::Write + ?Sized>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        out.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: std::io::Write + ?Sized>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        out.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: std::io::Write + ?Sized>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}

fn unix_days() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |since| since.as_secs() / 86_400)
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// The date in UTC. Times of day are refused: a prompt that changes every minute has no prefix to find again.
fn strftime(format: &str, unix_days: u64) -> Result<String, Error> {
    let (year, month, day) = civil(unix_days);
    let name = MONTHS.get(month as usize - 1).copied().unwrap_or_default();
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('m') => two_digits(month, &mut out),
            Some('d') => two_digits(day, &mut out),
            Some('B') => out.push_str(name),
            Some('b') => out.push_str(name.get(..3).unwrap_or(name)),
            Some('%') => out.push('%'),
            other => {
                let directive = other.map_or_else(String::new, |c| c.to_string());
                let message = format!("strftime_now knows %Y %m %d %B %b, not %{directive}");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
    }
    Ok(out)
}

fn two_digits(number: u64, out: &mut String) {
    if number < 10 {
        out.push('0');
    }
    out.push_str(&number.to_string());
}

/// Year, month and day of a day counted from 1970-01-01, in the Gregorian calendar.
fn civil(unix_days: u64) -> (u64, u64, u64) {
    // Counted from 0000-03-01, so that the leap day ends a year; 146,097 days are 400 years.
    let days = unix_days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * march + 2) / 5 + 1;
    let month = if march < 10 { march + 3 } else { march - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str) -> Result<String, ChatError> {
        let line = Line {
            role: "user",
            content: " a<b ".into(),
        };
        Template::new(source, "<s>", "</s>").unwrap().render(&[line])
    }

    #[test]
    fn dates_are_right() {
        for (days, want) in [(0, "01 Jan 1970"), (19_782, "29 Feb 2024"), (20_822, "04 Jan 2027")] {
            assert_eq!(strftime("%d %b %Y", days).unwrap(), want);
        }
        assert_eq!(strftime("%B %% %m", 19_782).unwrap(), "February % 02");
        assert!(strftime("%H", 0).is_err());
        assert!(strftime("%", 0).is_err());
    }

    #[test]
    fn templates_find_what_they_expect_of_python() {
        for (source, want) in [
            (
                "{{ bos_token }}{{ messages[0].content.strip() }}{{ eos_token }}",
                "<s>a<b</s>",
            ),
            ("{{ messages[0]['content'] | trim | upper }}", "A<B"),
            ("{{ messages | tojson }}", r#"[{"role": "user", "content": " a<b "}]"#),
            (
                "{{ [1, {'k': none}] | tojson(indent=2) }}",
                "[\n  1,\n  {\n    \"k\": null\n  }\n]",
            ),
            (
                "{% if tools is defined and tools %}x{% endif %}\n{{ 'a' if add_generation_prompt }}",
                "a",
            ),
            ("  {% for m in messages %}\n{{ m.role }}{% endfor %}", "user"),
        ] {
            assert_eq!(render(source).unwrap(), want, "{source}");
        }
    }

    #[test]
    fn a_template_may_refuse_but_not_run_on() {
        let refused = render("{{ raise_exception('roles must alternate') }}").unwrap_err();
        assert!(refused.to_string().contains("roles must alternate"), "{refused}");
        let endless = render("{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}");
        assert!(endless.unwrap_err().to_string().contains("fuel"));
        assert!(Template::new("{% for %}", "", "").is_err());
        assert!(Template::new(&"x".repeat(SOURCE_BYTES_MAX + 1), "", "").is_err());
    }
}

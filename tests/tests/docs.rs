//! The documents keep up with the code: every link resolves, and a function named beside a link is in that file.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::fs;
use std::path::{Path, PathBuf};

fn documents() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let records = fs::read_dir(root.join("docs/adr")).unwrap().map(|e| e.unwrap().path());
    let mut all: Vec<PathBuf> = ["README.md", "ARCHITECTURE.md"].map(|f| root.join(f)).into();
    all.extend(records);
    all
}

/// Targets of the relative links in `text`, and where they begin.
fn links(text: &str) -> Vec<(usize, &str)> {
    let begins = text.match_indices("](").map(|(i, _)| i + 2);
    let found = begins.filter_map(|i| Some((i, text[i..].split(')').next()?)));
    found.filter(|(_, target)| !target.contains("://")).collect()
}

/// `Type::function` names in the part of the sentence that leads to a link and ends in `](`.
fn names_before(text: &str) -> Vec<&str> {
    let part = text.rsplit(['\n', '|', ';']).next().unwrap_or_default();
    let part = part.strip_suffix("](").unwrap_or(part);
    // Behind the link before, if there is one.
    let own = part
        .rsplit_once("](")
        .map_or(part, |(_, rest)| rest.split_once(')').map_or("", |(_, rest)| rest));
    let quoted = own.split('`').skip(1).step_by(2);
    let is_path = |q: &&str| q.contains("::") && q.chars().all(|c| c.is_alphanumeric() || "_:".contains(c));
    quoted.filter(is_path).collect()
}

#[test]
fn every_link_resolves_and_every_function_is_there() {
    let mut wrong = Vec::new();
    let (mut seen, mut named) = (0, 0);
    for document in documents() {
        let text = fs::read_to_string(&document).unwrap();
        for (at, target) in links(&text) {
            seen += 1;
            let file = document.parent().unwrap().join(target.split('#').next().unwrap());
            if !file.exists() {
                wrong.push(format!("{}: {target} is not there", document.display()));
                continue;
            }
            if file.extension().is_none_or(|e| e != "rs") {
                continue;
            }
            let source = fs::read_to_string(&file).unwrap();
            for name in names_before(&text[..at]) {
                named += 1;
                let last = name.rsplit("::").next().unwrap();
                let function = source.contains(&format!("fn {last}(")) || source.contains(&format!("fn {last}<"));
                let variant = last.starts_with(char::is_uppercase) && source.contains(last);
                if !function && !variant {
                    wrong.push(format!("{}: {name} is not in {target}", document.display()));
                }
            }
        }
    }
    assert!(
        seen > 100 && named > 30,
        "{seen} links, {named} names: the documents were not read"
    );
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn names_are_those_of_the_link() {
    let text = "x [old](a.rs) `A::old`; `B::one` and `two` in [new](";
    assert_eq!(names_before(text), ["B::one"]);
    assert_eq!(links("[a](b.rs) [c](https://d)"), [(4, "b.rs")]);
}

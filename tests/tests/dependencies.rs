//! No crate names a dependency that it does not use.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use pinion_tests::cargo_metadata;
use std::fs;
use std::path::Path;

/// All Rust text below a folder.
fn source(folder: &Path, text: &mut String) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            source(&path, text);
        } else if path.extension().is_some_and(|e| e == "rs") {
            text.push_str(&fs::read_to_string(&path).unwrap());
        }
    }
}

/// Whether the text says `name::` or `use name` anywhere: a macro or a path.
fn names(text: &str, crate_name: &str) -> bool {
    let plain = crate_name.replace('-', "_");
    let starts = |i: usize| !text[..i].ends_with(|c: char| c.is_alphanumeric() || c == '_');
    text.match_indices(&plain)
        .any(|(i, _)| starts(i) && text[i + plain.len()..].starts_with("::"))
        || text.contains(&format!("use {plain};"))
}

#[test]
fn every_dependency_is_used() {
    let metadata = cargo_metadata(&["--no-deps"]);
    let packages = metadata["packages"].as_array().unwrap();
    assert!(packages.len() >= 9);
    let mut unused = Vec::new();
    for package in packages {
        let folder = Path::new(package["manifest_path"].as_str().unwrap()).parent().unwrap();
        let (mut shipped, mut tests) = (String::new(), String::new());
        source(&folder.join("src"), &mut shipped);
        source(&folder.join("tests"), &mut tests);
        source(&folder.join("benches"), &mut tests);
        for dependency in package["dependencies"].as_array().unwrap() {
            let name = dependency["rename"].as_str().or(dependency["name"].as_str()).unwrap();
            let dev = dependency["kind"] == "dev";
            let used = names(&shipped, name) || dev && names(&tests, name);
            if !used {
                unused.push(format!("{} does not use {name}", package["name"]));
            }
        }
    }
    assert!(unused.is_empty(), "{unused:#?}");
}

#[test]
fn a_name_within_a_name_is_no_use() {
    assert!(names("let x = serde_json::Value;", "serde-json"));
    assert!(names("use bytes;", "bytes"));
    assert!(!names("let x = my_serde_json::Value;", "serde_json"));
    assert!(!names("// serde_json", "serde_json"));
}

//! The dependency walls of design §3, read off `cargo metadata`.

use pinion_tests::cargo_metadata;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Crates that must not reach into the decisions: runtimes, buses, actors, metrics, randomness, devices.
const OUTSIDE: &[&str] = &["tokio", "async-nats", "ractor", "metrics", "rand", "ibverbs", "sideway"];
/// Packages that are pure.
const PURE: &[&str] = &["pinion-schemas", "pinion-core"];
/// Crates that one package alone may name.
const RESERVED: &[(&str, &str)] = &[
    ("async-nats", "pinion-bus"),
    ("anyhow", "pinion"),
    ("sideway", "pinion-transfer"),
    ("rdma-mummy-sys", "pinion-transfer"),
];
/// Every package in the order of design §3, with what it may use of ours; `*` is everything above it.
const MAY_USE: &[(&str, &[&str])] = &[
    ("pinion-schemas", &[]),
    ("pinion-core", &["pinion-schemas"]),
    ("pinion-bus", &["pinion-schemas"]),
    ("pinion-transfer", &["pinion-schemas"]),
    (
        "pinion-actors",
        &["pinion-schemas", "pinion-core", "pinion-bus", "pinion-transfer"],
    ),
    ("pinion-gpu-agent", &["*"]),
    ("pinion-gateway", &["pinion-schemas", "pinion-bus", "pinion-actors"]),
    ("pinion-eval", &["*"]),
    ("pinion-chaos", &["*"]),
    ("pinion", &["*"]),
    ("pinion-tests", &["*"]),
];

/// One package: the names it declares (of any kind), and of these the ones in its normal and build dependencies.
#[derive(Default, Clone)]
struct Package {
    declares: BTreeSet<String>,
    ships: BTreeSet<String>,
    /// Ids of the packages its normal dependencies resolve to.
    resolved: BTreeSet<String>,
    name: String,
    ours: bool,
}

type Graph = BTreeMap<String, Package>;

fn text(v: &Value) -> String {
    v.as_str().unwrap_or_default().to_owned()
}

fn list(v: &Value) -> &[Value] {
    v.as_array().map_or(&[], Vec::as_slice)
}

fn graph(metadata: &Value) -> Graph {
    let members: BTreeSet<String> = list(&metadata["workspace_members"]).iter().map(text).collect();
    let mut graph = Graph::new();
    for p in list(&metadata["packages"]) {
        let id = text(&p["id"]);
        let mut package = Package {
            name: text(&p["name"]),
            ours: members.contains(&id),
            ..Package::default()
        };
        for d in list(&p["dependencies"]) {
            package.declares.insert(text(&d["name"]));
            if d["kind"] != "dev" {
                package.ships.insert(text(&d["name"]));
            }
        }
        graph.insert(id, package);
    }
    for n in list(&metadata["resolve"]["nodes"]) {
        if let Some(package) = graph.get_mut(&text(&n["id"])) {
            let normal = |d: &&Value| list(&d["dep_kinds"]).iter().any(|k| k["kind"].is_null());
            package.resolved = list(&n["deps"])
                .iter()
                .filter(normal)
                .map(|d| text(&d["pkg"]))
                .collect();
        }
    }
    graph
}

/// Names of everything `id` reaches through normal dependencies.
fn reach(graph: &Graph, id: &str) -> BTreeSet<String> {
    let (mut seen, mut todo) = (BTreeSet::from([id.to_owned()]), vec![id.to_owned()]);
    while let Some(package) = todo.pop().and_then(|i| graph.get(&i)) {
        todo.extend(package.resolved.iter().filter(|d| seen.insert((*d).clone())).cloned());
    }
    seen.iter()
        .filter_map(|i| graph.get(i))
        .map(|p| p.name.clone())
        .collect()
}

/// Every breach of the walls, as sentences.
fn breaches(graph: &Graph) -> Vec<String> {
    let mut out = Vec::new();
    for (id, p) in graph.iter().filter(|(_, p)| p.ours) {
        let name = p.name.as_str();
        if PURE.contains(&name) {
            let reached = reach(graph, id);
            out.extend(
                OUTSIDE
                    .iter()
                    .filter(|o| reached.contains(**o))
                    .map(|o| format!("{name} reaches {o}")),
            );
        }
        for (reserved, owner) in RESERVED {
            if name != *owner && p.declares.contains(*reserved) {
                out.push(format!("{name} names {reserved}, which only {owner} may"));
            }
        }
        let Some(row) = MAY_USE.iter().position(|(n, _)| *n == name) else {
            out.push(format!("{name} has no row in design §3"));
            continue;
        };
        for used in p
            .ships
            .iter()
            .filter(|d| d.as_str() == "pinion" || d.starts_with("pinion-"))
        {
            let listed = MAY_USE[row].1.contains(&used.as_str());
            let above = MAY_USE[row].1.contains(&"*") && MAY_USE[..row].iter().any(|(n, _)| n == used);
            if !listed && !above {
                out.push(format!("{name} may not use {used}"));
            }
        }
    }
    out
}

#[test]
fn the_walls_stand() {
    let graph = graph(&cargo_metadata(&["--locked"]));
    for pure in PURE {
        let id = graph.iter().find(|(_, p)| p.name == *pure && p.ours).map(|(id, _)| id);
        let reached = reach(&graph, id.unwrap_or_else(|| panic!("{pure} is no member")));
        assert!(reached.contains("serde"), "{pure}: the graph was not read");
    }
    let found = breaches(&graph);
    assert!(found.is_empty(), "{found:#?}");
}

/// The check can fail: each wall, broken by hand, is named; without the breach nothing is.
#[test]
fn a_broken_wall_is_found() {
    let package = |name: &str, deps: &[&str]| {
        let names: BTreeSet<String> = deps.iter().map(|d| (*d).to_owned()).collect();
        let ours = name.starts_with("pinion");
        let p = Package {
            name: name.into(),
            ours,
            declares: names.clone(),
            ships: names.clone(),
            resolved: names,
        };
        (name.to_owned(), p)
    };
    let sound = Graph::from([
        package("pinion-schemas", &["serde"]),
        package("pinion-core", &["pinion-schemas"]),
        package("pinion-bus", &["pinion-schemas", "async-nats"]),
        package("pinion-eval", &["pinion-bus", "pinion-core"]),
        package("pinion", &["anyhow", "pinion-eval"]),
        package("serde", &[]),
        package("helper", &["tokio"]),
        package("tokio", &[]),
        package("async-nats", &["tokio"]),
        package("anyhow", &[]),
    ]);
    assert_eq!(breaches(&sound), Vec::<String>::new());
    for (name, deps, want) in [
        ("pinion-core", &["helper"][..], "pinion-core reaches tokio"),
        (
            "pinion-eval",
            &["async-nats"],
            "pinion-eval names async-nats, which only pinion-bus may",
        ),
        (
            "pinion-eval",
            &["anyhow"],
            "pinion-eval names anyhow, which only pinion may",
        ),
        (
            "pinion-eval",
            &["sideway"],
            "pinion-eval names sideway, which only pinion-transfer may",
        ),
        ("pinion-bus", &["pinion-core"], "pinion-bus may not use pinion-core"),
        ("pinion-eval", &["pinion-chaos"], "pinion-eval may not use pinion-chaos"),
        ("pinion-new", &[], "pinion-new has no row in design §3"),
    ] {
        let mut broken = sound.clone();
        broken.extend([package(name, deps)]);
        assert_eq!(breaches(&broken), vec![want.to_owned()]);
    }
}

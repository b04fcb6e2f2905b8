//! The proof that a moved page is the right page: fifty real conversations with a real model say the same, token by token, whether
//! one engine does all of it, or workers whose pages come from others, over the real transfer plane and in real time.
//!
//! | arm | what it is |
//! |---|---|
//! | fused | one engine, turn after turn, no cluster: what the others are compared with |
//! | seeded | 1 P + 3 D: each session is seeded once |
//! | migrated | 1 P + 3 D, all D but one drain, another one each turn: a session is reseeded each turn on a D that has nothing of it, and in the end comes back to one that has an old part |
//! | from the file | 1 P + 3 D with file tiers, after a turn all D are killed and started again: a session goes on where it was, and its pages are loaded |
//! | from backup | 1 P + 3 D, after each turn all D are killed: a session is reseeded each turn from its backup on P |
//!
//! | module | what it holds |
//! |---|---|
//! | [`talk`] | the conversations, and what was said in them so far |
//! | [`fused`] | the first arm |
//! | [`rig`] | a cluster of native workers, and what its events tell |
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod fused;
mod rig;
mod talk;

use pinion_gpu_agent::engine::native::{Model, NativeConfig};
use pinion_schemas::BackupTargets;
use pinion_schemas::Path as Served;
use pinion_schemas::limits::STALENESS_TOKENS_MAX;
use rig::{Rig, Turn};
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;
use talk::{Talks, Tokens, Voice};

/// Tokens of a page: few, so that many pages move.
const PAGE: usize = 16;
/// Longest answer, tokens.
const ANSWER: u32 = 12;
/// Turns of each conversation in most arms.
const TURNS: usize = 3;
/// In the one that needs the most.
const TURNS_MOST: usize = TURNS + 1;

/// What all arms share.
struct Scene {
    model: Arc<Model>,
    voice: Arc<Voice>,
    /// What the fused engine answered: `[turn][conversation]`.
    fused: Vec<Vec<Tokens>>,
}

/// The model's file; `None` if `make model` has not been run. One that was named must be there.
fn model_file() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("PINION_MODEL") {
        return Some(named.into());
    }
    let usual = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../.tools/models/SmolLM2-135M-Instruct.Q4_1.gguf"
    );
    Some(PathBuf::from(usual)).filter(|path| path.exists())
}

impl Scene {
    fn load() -> Option<Self> {
        let Some(file) = model_file() else {
            // Past the test runner, which hides what a passed test prints.
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: same_text needs a model; `make model` fetches it"
            );
            return None;
        };
        let model = Model::load(&file).unwrap();
        let voice = Arc::new(Voice::open(&file));
        let begun = Instant::now();
        let fused = fused::answers(model.clone(), Talks::new(voice.clone()));
        println!("fused: {:.1} s", begun.elapsed().as_secs_f64());
        Some(Self { model, voice, fused })
    }
}

/// Runs an arm in real time, and no other beside it: they would only wait for each other's processors.
fn arm<F: Future>(run: impl FnOnce(&'static Scene) -> F) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    static SCENE: OnceLock<Option<Scene>> = OnceLock::new();
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(scene) = SCENE.get_or_init(Scene::load) else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.unwrap().block_on(run(scene));
}

/// A cluster, and the conversations it takes part in.
struct Arm {
    name: &'static str,
    scene: &'static Scene,
    talks: Talks,
    rig: Rig,
    begun: Instant,
}

impl Arm {
    async fn begin(name: &'static str, scene: &'static Scene, backups: BackupTargets) -> Self {
        Self::with(name, scene, backups, rig::engine_config()).await
    }

    /// With decode workers of another kind.
    async fn with(name: &'static str, scene: &'static Scene, backups: BackupTargets, decode: NativeConfig) -> Self {
        Self {
            name,
            scene,
            talks: Talks::new(scene.voice.clone()),
            begun: Instant::now(),
            rig: Rig::start(scene.model.clone(), backups, decode).await,
        }
    }

    /// All conversations have one more turn, at once; what is answered must be what the fused engine answered.
    async fn turn(&mut self) -> Vec<Turn> {
        let turn = self.talks.turn();
        let prompts = self.talks.prompts();
        let begun = Instant::now();
        let served = self.rig.serve(prompts).await;
        println!("{}, turn {turn}: {:.1} s", self.name, begun.elapsed().as_secs_f64());
        let answers: Vec<Tokens> = served.iter().map(|t| t.answer.clone()).collect();
        let wrong = self.talks.differences(&self.scene.fused[turn], &answers);
        assert!(
            wrong.is_empty(),
            "arm `{}`, turn {turn}: {} of {} answers differ\n{}",
            self.name,
            wrong.len(),
            answers.len(),
            wrong.join("\n")
        );
        self.talks.said(answers);
        served
    }

    /// A turn for which every session must be seeded; and most of the pages must get where they went.
    async fn seeded_turn(&mut self) -> Vec<Turn> {
        let first = self.talks.turn() == 0;
        let path = if first { Served::Seed } else { Served::Reseed };
        let mut turns = self.turn().await;
        self.rig.hear_of_seeds(&mut turns).await;
        for (at, turn) in turns.iter().enumerate() {
            let title = self.talks.title(at);
            assert_eq!(turn.path, path, "{}: {title}", self.name);
            assert!(turn.moved_pages > 0, "{}: {title}: no page came", self.name);
        }
        let sent: usize = turns.iter().map(|turn| turn.moved_pages).sum();
        let came = self.rig.stored_pages();
        println!("{}: {came} pages came of {sent}", self.name);
        // On a slow machine a transfer may be late, which costs only time; those shared by sessions come once.
        assert!(came * 10 >= sent * 7, "{}: {came} pages came of {sent}", self.name);
        turns
    }

    async fn end(self) {
        self.rig.rests().await;
        println!("{}: {:.1} s", self.name, self.begun.elapsed().as_secs_f64());
    }
}

#[test]
fn seeded_pages_say_the_same() {
    arm(async |scene| {
        let mut arm = Arm::begin("seeded", scene, BackupTargets::LastPrefill).await;
        arm.seeded_turn().await;
        for _ in 1..TURNS {
            let turns = arm.turn().await;
            let direct = turns.iter().filter(|t| t.path == Served::Direct).count();
            assert!(direct > 0, "no session stayed where it was");
        }
        arm.end().await;
    });
}

#[test]
fn migrated_sessions_say_the_same() {
    arm(async |scene| {
        let mut arm = Arm::begin("migrated", scene, BackupTargets::Off).await;
        arm.rig.drain_all_but("d0").await;
        let first = arm.seeded_turn().await;
        for open in ["d1", "d2"] {
            arm.rig.drain_all_but(open).await;
            let turns = arm.seeded_turn().await;
            // The P does not know the answers, so the D that was left is the cheaper source.
            let moved = arm.rig.moved_sessions();
            println!("migrated: {moved} of {} sessions came from the other D", turns.len());
            assert!(
                moved * 2 > turns.len(),
                "{moved} of {} sessions came from a D",
                turns.len()
            );
        }
        // It still has what the first turn left, so it takes the rest as a long append and computes it: no seed.
        arm.rig.drain_all_but("d0").await;
        for (first, last) in first.iter().zip(arm.turn().await) {
            assert!(
                last.cached + PAGE >= first.prompt.len(),
                "the first prompt is not on d0"
            );
        }
        arm.end().await;
    });
}

#[test]
fn sessions_from_a_backup_say_the_same() {
    arm(async |scene| {
        let mut arm = Arm::begin("from backup", scene, BackupTargets::LastPrefill).await;
        let mut before: Option<Vec<Turn>> = None;
        for _ in 0..TURNS {
            let turns = arm.seeded_turn().await;
            for (at, now) in turns.iter().enumerate() {
                if let Some(before) = &before {
                    within_beta(arm.talks.title(at), &before[at], now);
                }
            }
            arm.rig.backups_arrive(&turns).await;
            arm.rig.replace_all_decode_workers().await;
            before = Some(turns);
        }
        arm.end().await;
    });
}

#[test]
fn sessions_from_the_file_say_the_same() {
    arm(async |scene| {
        let files = rig::Files::new();
        let mut arm = Arm::with("from the file", scene, BackupTargets::Off, files.engine_config()).await;
        let before = arm.seeded_turn().await;
        arm.rig.files_have_all().await;
        arm.rig.replace_all_decode_workers().await;
        let mut cached = 0;
        for (at, now) in arm.turn().await.iter().enumerate() {
            let (title, said) = (arm.talks.title(at), before[at].context());
            assert_eq!(now.path, Served::Direct, "{title}");
            // The last token of an answer has no KV.
            let held = &said[..said.len() - 1];
            let common = held.iter().zip(&now.prompt).take_while(|(a, b)| a == b).count();
            assert_eq!(
                now.cached,
                common / PAGE * PAGE,
                "{title}: not all full pages were loaded"
            );
            cached += now.cached;
        }
        // Sessions begin alike, and what is loaded for one is there for the next.
        let reloaded = arm.rig.reloaded_pages().await * PAGE;
        println!("{}: {reloaded} tokens loaded, {cached} not computed", arm.name);
        assert!(reloaded <= cached && reloaded * 10 >= cached * 7);
        arm.end().await;
    });
}

/// At most β and a page of what the turn before had committed is computed again.
fn within_beta(title: &str, before: &Turn, now: &Turn) {
    // What the next prompt has in common with it: a model may write what its tokenizer would not.
    let held = before.context();
    let common = held.iter().zip(&now.prompt).take_while(|(a, b)| a == b).count();
    let again = (now.computed_tokens + common).saturating_sub(now.prompt.len());
    let beta = before.committed.clamp(PAGE, STALENESS_TOKENS_MAX as usize);
    assert!(
        again <= beta + PAGE,
        "{title}: {again} tokens computed again, β is {beta}"
    );
    // And because this backup had arrived, no more than the page that was not full.
    assert!(
        again <= PAGE,
        "{title}: {again} tokens computed again, all full pages were on P"
    );
}

//! The conversations, and what was said in them so far.

use pinion_gateway::tokenizer::{GgufTokenizer, Spoken, Tokenizer as _};
use std::path::Path;
use std::sync::Arc;

/// A prompt or an answer.
pub type Tokens = Vec<u32>;

/// Where they come from: `tests/data/README.md`.
const CONVERSATIONS: &str = include_str!("../../../tests/data/conversations.jsonl");

/// What users say who have no more to say.
const AGAIN: &str = "Please say that again in other words.";

/// The model's words.
pub struct Voice(GgufTokenizer);

impl Voice {
    /// Of the model in this file.
    pub fn open(file: &Path) -> Self {
        Self(GgufTokenizer::open(file).unwrap())
    }

    fn text(&self, answer: &[u32]) -> String {
        let (mut decoder, mut text) = (self.0.decoder(), String::new());
        decoder.push(answer, &mut text);
        decoder.finish(&mut text);
        text
    }
}

struct Talk {
    title: String,
    /// What the user says.
    turns: Vec<String>,
    said: Vec<Spoken>,
}

impl Talk {
    fn read(line: &str) -> Self {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let turns = line["turns"].as_array().unwrap().iter();
        Self {
            title: line["title"].as_str().unwrap().to_owned(),
            turns: turns.map(|t| t.as_str().unwrap().to_owned()).collect(),
            said: Vec::new(),
        }
    }
}

/// All conversations, each at the same turn.
pub struct Talks {
    voice: Arc<Voice>,
    all: Vec<Talk>,
    turn: usize,
}

impl Talks {
    /// In which nothing was said yet.
    pub fn new(voice: Arc<Voice>) -> Self {
        let all: Vec<Talk> = CONVERSATIONS.lines().map(Talk::read).collect();
        assert_eq!(all.len(), 50);
        Self { voice, all, turn: 0 }
    }

    /// Turns they had.
    pub fn turn(&self) -> usize {
        self.turn
    }

    /// Name of a conversation.
    pub fn title(&self, at: usize) -> &str {
        &self.all[at].title
    }

    /// The users speak: what the model is asked now, with all that was said before.
    pub fn prompts(&mut self) -> Vec<Tokens> {
        let (voice, turn) = (&self.voice, self.turn);
        let prompt = |talk: &mut Talk| {
            let text = talk.turns.get(turn).map_or(AGAIN, String::as_str);
            talk.said.push(spoken("user", text.to_owned()));
            voice.0.chat(&talk.said).unwrap()
        };
        self.all.iter_mut().map(prompt).collect()
    }

    /// The model has answered.
    pub fn said(&mut self, answers: Vec<Tokens>) {
        for (talk, answer) in self.all.iter_mut().zip(answers) {
            talk.said.push(spoken("assistant", self.voice.text(&answer)));
        }
        self.turn += 1;
    }

    /// Answers that are not as they should be, in words.
    pub fn differences(&self, wanted: &[Tokens], got: &[Tokens]) -> Vec<String> {
        let pairs = self.all.iter().zip(wanted.iter().zip(got));
        let wrong = pairs.filter(|(_, (wanted, got))| wanted != got);
        let tell = |(talk, (wanted, got)): (&Talk, (&Tokens, &Tokens))| {
            let (fused, here) = (self.voice.text(wanted), self.voice.text(got));
            format!(
                "{}:\n  fused {fused:?} {wanted:?}\n  here  {here:?} {got:?}",
                talk.title
            )
        };
        wrong.map(tell).collect()
    }
}

fn spoken(role: &str, content: String) -> Spoken {
    let role = role.to_owned();
    Spoken { role, content }
}

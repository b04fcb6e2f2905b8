//! A small HTTP server that answers as the gateway would, or wrongly on purpose.

use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

#[derive(Clone, Debug)]
pub struct Seen {
    pub at: Instant,
    pub ended: Option<Instant>,
    pub session: String,
    pub prompt: Vec<u32>,
    pub max_tokens: u32,
}

#[derive(Clone)]
pub enum Reply {
    /// So many of the asked tokens, this finish reason, `[DONE]`.
    Tokens(u32, &'static str),
    /// A whole answer with this head and body.
    Raw(&'static str, &'static str),
    /// Two tokens, then the connection is cut.
    Cut,
    /// Two tokens, then nothing.
    Hang,
}

pub type Log = Arc<Mutex<Vec<Seen>>>;

/// A server that answers the n-th request of the run with `script(n, session)`.
pub async fn serve(script: impl Fn(usize, &str) -> Reply + Send + Sync + 'static) -> (String, Log) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let log = Log::default();
    let (script, seen) = (Arc::new(script), Arc::clone(&log));
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (script, seen) = (Arc::clone(&script), Arc::clone(&seen));
            tokio::spawn(async move { connection(stream, &*script, &seen).await });
        }
    });
    (url, log)
}

async fn request(stream: &mut TcpStream) -> Option<Seen> {
    let mut bytes = Vec::new();
    let head = loop {
        if let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") {
            break end + 4;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let text = String::from_utf8(bytes[..head].to_vec()).unwrap().to_lowercase();
    assert!(text.starts_with("post /v1/completions http/1.1\r\n"), "{text}");
    let field = |name: &str| {
        text.lines()
            .find_map(|l| l.strip_prefix(name))
            .map(|v| v.trim().to_owned())
    };
    let length: usize = field("content-length:").unwrap().parse().unwrap();
    while bytes.len() < head + length {
        stream.read_buf(&mut bytes).await.ok()?;
    }
    let body: Value = serde_json::from_slice(&bytes[head..]).unwrap();
    assert_eq!((&body["stream"], &body["model"]), (&json!(true), &json!("m")));
    Some(Seen {
        at: Instant::now(),
        ended: None,
        session: field("x-session-id:").unwrap(),
        prompt: serde_json::from_value(body["prompt"].clone()).unwrap(),
        max_tokens: serde_json::from_value(body["max_tokens"].clone()).unwrap(),
    })
}

/// The `i`-th token of an answer: outside the vocabulary of prompts, and different for every prompt.
pub fn answer_token(prompt: &[u32], i: u32) -> u32 {
    10_000 + (prompt.len() as u32) * 100 + i
}

async fn piece(stream: &mut TcpStream, text: &str) {
    let chunk = format!("{:x}\r\n{text}\r\n", text.len());
    let _ = stream.write_all(chunk.as_bytes()).await;
}

async fn event(stream: &mut TcpStream, value: &Value) {
    // Cut in the middle of the event.
    let text = format!("data: {value}\r\n\r\n");
    let (a, b) = text.split_at(text.len() / 2);
    piece(stream, a).await;
    tokio::task::yield_now().await;
    piece(stream, b).await;
}

async fn connection(mut stream: TcpStream, script: &(dyn Fn(usize, &str) -> Reply + Send + Sync), log: &Log) {
    const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.set_nodelay(true).unwrap();
    while let Some(seen) = request(&mut stream).await {
        let (index, first) = {
            let mut log = log.lock().unwrap();
            let first = log.iter().all(|s| s.session != seen.session);
            log.push(seen.clone());
            (log.len() - 1, first)
        };
        let reply = script(index, &seen.session);
        if let Reply::Raw(head, body) = reply {
            let text = format!("HTTP/1.1 {head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            stream.write_all(text.as_bytes()).await.unwrap();
            continue;
        }
        let count = if let Reply::Tokens(n, _) = reply { n } else { 2 };
        stream.write_all(HEAD.as_bytes()).await.unwrap();
        piece(&mut stream, ": hello\n\n").await;
        for i in 0..count {
            let ids = [answer_token(&seen.prompt, i)];
            // Both places in turn, and once both at once.
            let mut chunk = json!({"choices": [{"text": "x", "finish_reason": null}]});
            if i != 1 {
                chunk["choices"][0]["token_ids"] = json!(ids);
            }
            if i != 0 {
                chunk["pinion"] = json!({"tokens": ids});
            }
            event(&mut stream, &chunk).await;
        }
        match reply {
            Reply::Cut => return,
            Reply::Hang => {
                // Until the client goes away.
                let _ = stream.read_u8().await;
                log.lock().unwrap()[index].ended = Some(Instant::now());
                return;
            }
            Reply::Tokens(_, finish) => {
                let chunk = json!({
                    "choices": [{"text": "", "finish_reason": finish}],
                    "usage": {"prompt_tokens": seen.prompt.len(), "completion_tokens": count},
                    "pinion": {
                        "session": seen.session, "request": "r1", "cached_tokens": seen.prompt.len() / 2,
                        "path": if first { "seed" } else { "direct" },
                    },
                });
                event(&mut stream, &chunk).await;
                log.lock().unwrap()[index].ended = Some(Instant::now());
                piece(&mut stream, "data: [DONE]\n\n").await;
            }
            Reply::Raw(..) => {}
        }
        let _ = stream.write_all(b"0\r\n\r\n").await;
    }
}

//! Everything that reads bytes of others, each behind one function: what the property test and the fuzzer feed.
//!
//! A decoder may refuse what it is given; it may not panic, hang, or let anything through that breaks a rule of its own, which is
//! asserted here. Where a checksum stands before what is worth testing, it is made right first.

use pinion_eval::trace;
use pinion_gateway::identity;
use pinion_gateway::openai::{ChatBody, Common, CompletionBody, read};
use pinion_gateway::tokenizer::{ByteTokenizer, GgufTokenizer, Tokenizer as _};
use pinion_gpu_agent::engine::native::Model;
use pinion_schemas::shard::Lease;
use pinion_schemas::trace_context::TraceContext;
use pinion_schemas::wire::PREFIX_BYTES;
use pinion_schemas::{Epoch, Micros, messages, subject};
use pinion_transfer::{Address, Dtype, Inbox, Layout, Pool, tcp};
use tokio::io::AsyncWriteExt as _;

/// A decoder and its name, which is that of its folder of examples and of its fuzz target.
pub struct Decoder {
    /// Name.
    pub name: &'static str,
    /// Feeds it.
    pub run: fn(&[u8]),
}

/// All of them.
pub const DECODERS: [Decoder; 7] = [
    Decoder {
        name: "wire",
        run: wire,
    },
    Decoder {
        name: "names",
        run: names,
    },
    Decoder {
        name: "pages",
        run: pages,
    },
    Decoder {
        name: "http",
        run: http,
    },
    Decoder {
        name: "trace",
        run: trace_lines,
    },
    Decoder {
        name: "import",
        run: import,
    },
    Decoder {
        name: "gguf",
        run: gguf,
    },
];

/// Feeds the decoder of this name.
///
/// # Panics
/// If there is none, or if it does what it may not.
pub fn feed(name: &str, bytes: &[u8]) {
    let decoder = DECODERS.iter().find(|d| d.name == name).expect("no such decoder");
    (decoder.run)(bytes);
}

/// Frames of the bus, as they are and with length and checksum made right.
fn wire(bytes: &[u8]) {
    let _ = messages::check(bytes);
    if let Some((head, body)) = bytes.split_at_checked(PREFIX_BYTES) {
        let mut framed = head.to_vec();
        framed[8..12].copy_from_slice(&(body.len() as u32).to_le_bytes());
        framed[12..].copy_from_slice(&(xxhash_rust::xxh3::xxh3_64(body) as u32).to_le_bytes());
        framed.extend_from_slice(body);
        let _ = messages::check(&framed);
    }
}

/// Text that arrives in subjects, headers, and keys.
fn names(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let _ = subject::parse(text);
    let _ = pinion_bus::subject::is_pattern(text);
    if pinion_bus::subject::is_subject(text) {
        assert!(pinion_bus::subject::matches(text, text));
    }
    if let Some(context) = TraceContext::parse(text) {
        assert_eq!(TraceContext::parse(&context.to_string()), Some(context));
    }
    if let Ok(address) = text.parse::<Address>() {
        assert_eq!(address.to_string().parse(), Ok(address));
    }
    let _ = serde_json::from_str::<Lease>(text);
}

/// A page server's connection: behind a right hello comes whatever comes, the head's checksum made right. Nothing but granted slots may
/// be taken, and all are free in the end.
fn pages(bytes: &[u8]) {
    const HEAD: usize = 48;
    let layout = Layout {
        model: 1,
        layers: 1,
        kv_heads: 1,
        head_dim: 4,
        page_tokens: 4,
        dtype: Dtype::F32,
    };
    let pool = Pool::new(layout, 4).expect("a pool of 512 bytes");
    let inbox = Inbox::new(pool.clone(), Epoch(1));
    let grant = inbox.grant(2, 5, Micros(1)).expect("two of four slots");
    let mut script = bytes.to_vec();
    if let Some((head, _)) = script.split_at_mut_checked(HEAD) {
        // A hostile peer knows its grant.
        head[..8].copy_from_slice(&grant.id.to_le_bytes());
        let sum = pinion_transfer::layout::digest(&head[..HEAD - 8]) as u64;
        head[HEAD - 8..].copy_from_slice(&sum.to_le_bytes());
    }
    let run = async {
        let (mut near, far) = tokio::io::duplex(1 << 16);
        let peer = async {
            let mut hello = [0; 40];
            tokio::io::AsyncReadExt::read_exact(&mut near, &mut hello).await?;
            // The layouts are one, so the server's own hello is the right one.
            near.write_all(&hello).await?;
            near.write_all(&script).await?;
            near.shutdown().await?;
            tokio::io::copy(&mut near, &mut tokio::io::sink()).await
        };
        let (_, _) = tokio::join!(peer, tcp::serve_stream(far, inbox.clone()));
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build();
    runtime.expect("a runtime").block_on(run);
    assert_eq!(pool.usage().free, 2, "slots that were not granted are free");
    assert!(inbox.take(grant.id).len() <= 2);
    assert_eq!(pool.usage().free, 4, "all slots are free in the end");
}

/// Bodies of requests, down to the prompt's tokens.
fn http(bytes: &[u8]) {
    let tokenizer = ByteTokenizer::new(1_000);
    let _ = read::<Common>(bytes);
    if let Ok(spoken) = read::<ChatBody>(bytes).and_then(ChatBody::spoken)
        && let Ok(tokens) = tokenizer.chat(&spoken)
    {
        assert!(tokens.iter().all(|id| *id < tokenizer.vocab()));
    }
    let _ = read::<CompletionBody>(bytes);
    if let Ok(text) = std::str::from_utf8(bytes) {
        let mut headers = reqwest::header::HeaderMap::new();
        if let Ok(value) = text.parse() {
            headers.insert("x-session-id", value);
        }
        let _ = identity::class(&headers);
    }
}

/// Traces of all formats.
fn trace_lines(bytes: &[u8]) {
    let first = bytes.split(|b| *b == b'\n').next().unwrap_or_default();
    let Some(format) = trace::detect(&String::from_utf8_lossy(first)) else {
        return;
    };
    if let Ok(report) = trace::read(bytes, format, false) {
        for session in &report.trace.sessions {
            assert!(session.turns.iter().all(|turn| turn.input_tokens <= trace::MAX_TOKENS));
        }
    }
}

/// Logs that become traces.
fn import(bytes: &[u8]) {
    let _ = trace::import::audit(bytes, false);
    let options = trace::import::ShareGptOptions::default();
    let encode = |text: &str| text.bytes().map(u32::from).collect();
    let _ = trace::import::sharegpt(bytes, encode, &options, |_| Ok(()));
}

/// A model's file: its weights, and its tokenizer.
fn gguf(bytes: &[u8]) {
    let _ = Model::read(bytes);
    let _ = GgufTokenizer::read(bytes);
}

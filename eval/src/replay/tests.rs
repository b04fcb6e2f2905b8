//! The replay against a small HTTP server over real sockets and real time.

mod offline;
mod server;

use super::*;
use crate::trace::{BlockRun, Turn};
use pinion_schemas::Micros;
use server::{Log, Reply, Seen, answer_token, serve};
use tokio::net::TcpListener;

const VOCAB: Vocab = Vocab { first: 100, size: 1000 };

fn all(_: usize, _: &str) -> Reply {
    Reply::Tokens(3, "length")
}

fn turn(input: u32, start: u64, think_ms: u64) -> Turn {
    Turn {
        input_tokens: input,
        output_tokens: 3,
        at: Micros::ZERO,
        think: Micros::from_millis(think_ms),
        blocks: vec![BlockRun {
            start,
            len: input.div_ceil(4),
        }],
        block_tokens: 4,
    }
}

fn session(id: &str, turns: Vec<Turn>) -> Session {
    Session {
        id: id.to_owned(),
        start: Micros::ZERO,
        turns,
        namespace: namespace_of(id),
        head_tokens: 0,
        parent: None,
        agent_head: false,
    }
}

fn trace(sessions: Vec<Session>) -> Trace {
    Trace { sessions }
}

fn options(url: &str) -> ReplayOptions {
    ReplayOptions {
        request_timeout: Duration::from_secs(20),
        ..ReplayOptions::new(url, "m", VOCAB)
    }
}

#[tokio::test]
async fn turns_run_in_order_and_carry_the_real_answer() {
    let (url, log) = serve(all).await;
    let sessions: Vec<Session> = (0..6)
        // Grows by 8; then by 1, less than the answer; then a reset; then on from it.
        .map(|i| {
            session(
                &format!("s{i}"),
                vec![
                    turn(8, 0, 0),
                    turn(16, 0, 0),
                    turn(17, 0, 0),
                    turn(12, 50, 0),
                    turn(20, 50, 0),
                ],
            )
        })
        .collect();
    let played = trace(sessions.clone());
    let (mut done, mut totals) = (Vec::new(), Vec::new());
    let summary = replay(
        played,
        ReplayOptions {
            concurrency: 3,
            ..options(&url)
        },
        |p| {
            done.push(p.done);
            totals.push(p.total);
        },
    )
    .await
    .unwrap();
    assert_eq!(summary.failed, 0, "{:?}", summary.examples);
    assert_eq!(done, (1..=30).collect::<Vec<_>>());
    assert!(totals.iter().all(|t| *t == 30));
    let log = log.lock().unwrap();
    for s in &sessions {
        let seen: Vec<&Seen> = log.iter().filter(|r| r.session == s.id).collect();
        assert_eq!(
            seen.iter().map(|r| r.prompt.len()).collect::<Vec<_>>(),
            [8, 16, 17, 12, 20]
        );
        assert!(
            seen.windows(2).all(|w| w[0].ended.unwrap() <= w[1].at),
            "a turn began before the last had ended"
        );
        let blocks = |i: usize| VOCAB.prompt(s, i, false).unwrap();
        let p = |i: usize| seen[i].prompt.as_slice();
        let answer = |i: usize| (0..3).map(|t| answer_token(p(i), t)).collect::<Vec<u32>>();
        assert_eq!(p(0), blocks(0));
        assert_eq!(p(1), [p(0), &answer(0), &blocks(1)[11..]].concat());
        assert_eq!(p(2), [p(1), &answer(1)[..1]].concat(), "never longer than in the trace");
        assert_eq!(p(3), blocks(3), "a reset restarts from the blocks");
        assert_eq!(p(4), [p(3), &answer(3), &blocks(4)[15..]].concat());
    }
    // At most three sessions at a time.
    for r in log.iter() {
        let busy = sessions.iter().filter(|s| {
            let of = || log.iter().filter(|o| o.session == s.id);
            of().any(|o| o.at <= r.at) && of().any(|o| o.ended.unwrap() > r.at)
        });
        assert!(busy.count() <= 3);
    }
    let carried: Vec<(u32, bool)> = summary
        .records
        .iter()
        .filter(|r| r.session == "s0")
        .map(|r| (r.carried, r.reset))
        .collect();
    assert_eq!(carried, [(0, false), (11, false), (17, false), (0, true), (15, false)]);
    assert_eq!((summary.sessions, summary.turns, summary.resets), (6, 30, 6));
    assert_eq!((summary.paths.direct, summary.paths.seed), (24, 6));
    assert_eq!(
        summary.paths_after_first.share(summary.paths_after_first.direct),
        Some(1.0)
    );
    assert!(summary.ttft_ms.unwrap().p50 <= summary.latency_ms.unwrap().p50);
    assert_eq!(summary.ttft_ms_by_path["direct"].count, 24);
}

#[tokio::test]
async fn blocks_mode_sends_the_blocks() {
    let (url, log) = serve(|_, _| Reply::Tokens(2, "length")).await;
    let s = session("s", vec![turn(8, 0, 0), turn(16, 0, 0)]);
    let options = ReplayOptions {
        prompts: PromptMode::Blocks,
        max_output_tokens: Some(2),
        ..options(&url)
    };
    let summary = replay(trace(vec![s.clone()]), options, |_| ()).await.unwrap();
    assert_eq!(log.lock().unwrap()[1].prompt, VOCAB.prompt(&s, 1, false).unwrap());
    assert_eq!((summary.failed, summary.records[1].carried), (0, 8));
    assert!(log.lock().unwrap().iter().all(|r| r.max_tokens == 2));
}

#[tokio::test]
async fn pauses_are_cut_and_scaled_and_starts_are_kept() {
    let (url, log) = serve(all).await;
    let mut late = session("late", vec![turn(8, 0, 9_000_000)]);
    late.start = Micros::from_millis(600);
    let early = session(
        "early",
        vec![turn(8, 0, 9_000_000), turn(12, 0, 9_000_000), turn(16, 0, 20)],
    );
    let options = ReplayOptions {
        max_think: Duration::from_millis(400),
        time_scale: 2.0,
        ..options(&url)
    };
    let ms = |think| pacing::pause(&turn(8, 0, think), &options).as_millis();
    assert_eq!([ms(0), ms(20), ms(400), ms(500), ms(9_000_000)], [0, 10, 200, 200, 200]);
    let summary = replay(trace(vec![late, early]), options, |_| ()).await.unwrap();
    let log = log.lock().unwrap();
    let of = |id: &str| log.iter().filter(|r| r.session == id).cloned().collect::<Vec<_>>();
    let (late, early) = (of("late"), of("early"));
    let after = |a: Instant, b: Instant, ms: u64| assert!(b - a >= Duration::from_millis(ms), "{:?}", b - a);
    after(early[0].at, late[0].at, 250);
    after(early[0].ended.unwrap(), early[1].at, 198);
    after(early[1].ended.unwrap(), early[2].at, 9);
    assert!(summary.wall_s < 60.0, "pauses of hours were cut");
}

async fn one(reply: Reply) -> TurnRecord {
    let request_timeout = Duration::from_millis(if matches!(reply, Reply::Hang) { 700 } else { 20_000 });
    let (url, _) = serve(move |_, _| reply.clone()).await;
    let options = ReplayOptions {
        request_timeout,
        ..options(&url)
    };
    let summary = replay(trace(vec![session("s", vec![turn(8, 0, 0)])]), options, |_| ())
        .await
        .unwrap();
    assert_eq!(summary.failures.values().sum::<usize>(), summary.failed);
    summary.records[0].clone()
}

#[tokio::test]
async fn failures_are_told_apart() {
    let reason = |r: TurnRecord| r.error.map(|e| e.reason.to_string());
    let label = |l: &str| Some(l.to_owned());
    assert_eq!(reason(one(Reply::Tokens(3, "length")).await), None);
    let early = one(Reply::Tokens(2, "stop")).await;
    assert_eq!(Summary::of(vec![early.clone()], 1.0).stopped_early, 1);
    assert_eq!(reason(early), None);
    assert_eq!(reason(one(Reply::Tokens(2, "length")).await), label("short-stream"));
    assert_eq!(reason(one(Reply::Tokens(4, "length")).await), label("long-stream"));
    assert_eq!(reason(one(Reply::Tokens(2, "abort")).await), label("aborted"));
    let cut = one(Reply::Cut).await;
    assert_eq!((cut.output, reason(cut)), (2, label("broken-stream")));
    let hang = one(Reply::Hang).await;
    assert!(hang.ttft_ms.is_some() && hang.latency_ms >= 700.0);
    assert_eq!((hang.output, reason(hang)), (2, label("timeout")));
    let raw = |head, body| one(Reply::Raw(head, body));
    let told = raw(
        "404 Not Found",
        r#"{"error":{"code":"model_not_found","message":"no such model"}}"#,
    )
    .await;
    assert_eq!(told.error.as_ref().unwrap().detail, "model_not_found: no such model");
    assert_eq!(reason(told), label("http-404"));
    assert_eq!(reason(raw("503 Busy", "").await), label("http-503"));
    let sse = "200 OK\r\ncontent-type: text/event-stream";
    assert_eq!(
        reason(raw(sse, "data: {\"error\":{\"message\":\"lost\"}}\n\n").await),
        label("server-error")
    );
    assert_eq!(reason(raw(sse, "data: {nonsense\n\n").await), label("bad-chunk"));
    assert_eq!(reason(raw(sse, "data: [DONE]\n\n").await), label("short-stream"));
    assert_eq!(
        reason(raw("200 OK\r\ncontent-type: application/json", "{}").await),
        label("bad-chunk")
    );
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let summary = replay(
        trace(vec![session("s", vec![turn(8, 0, 0), turn(16, 0, 0)])]),
        options(&format!("http://{closed}")),
        |_| (),
    );
    let summary = summary.await.unwrap();
    assert_eq!(summary.failures["connect"], 2);
    assert_eq!(summary.records[1].carried, 8, "a lost answer is not continued");
    assert_eq!((summary.ttft_ms, summary.paths.unknown), (None, 2));
}

#[tokio::test]
async fn busy_servers_are_tried_again_three_times() {
    let busy = |head| move |n: usize, _: &str| if n < 3 { Reply::Raw(head, "") } else { all(n, "") };
    let one_turn = || trace(vec![session("s", vec![turn(8, 0, 0)])]);
    let (url, log) = serve(busy("429 Too Many Requests\r\nretry-after: 0")).await;
    let summary = replay(one_turn(), options(&url), |_| ()).await.unwrap();
    assert_eq!((summary.failed, summary.retries, log.lock().unwrap().len()), (0, 3, 4));

    let (url, log) = serve(|_, _| Reply::Raw("503 Busy\r\nretry-after: 0", "")).await;
    let summary = replay(one_turn(), options(&url), |_| ()).await.unwrap();
    assert_eq!(
        (summary.failures["http-503"], summary.retries, log.lock().unwrap().len()),
        (1, 3, 4)
    );

    // A wait beyond the timeout is not begun.
    let (url, log) = serve(busy("503 Busy\r\nretry-after: 30")).await;
    let summary = replay(one_turn(), options(&url), |_| ()).await.unwrap();
    assert_eq!(
        (summary.failures["http-503"], summary.retries, log.lock().unwrap().len()),
        (1, 0, 1)
    );
    assert!(summary.wall_s < 10.0);
}

#[tokio::test]
async fn a_sub_agent_follows_its_parent() {
    let (url, log) = serve(all).await;
    let mut parent = session("p", vec![turn(8, 0, 0), turn(12, 0, 150), turn(16, 0, 150)]);
    for (turn, at) in parent.turns.iter_mut().zip([0, 1_000, 2_000]) {
        turn.at = Micros::from_secs(at);
    }
    let mut agent = session("p/1-a", vec![turn(8, 0, 0)]);
    (agent.parent, agent.start) = (Some("p".to_owned()), Micros::from_secs(1_500));
    let played = trace(vec![parent, agent, session("q", vec![turn(8, 0, 0)])]);
    let options = ReplayOptions {
        sessions: Some(1),
        session_prefix: "x-".to_owned(),
        ..options(&url)
    };
    replay(played.clone(), options.clone(), |_| ()).await.unwrap();
    let order = |log: &Log| log.lock().unwrap().drain(..).map(|r| r.session).collect::<Vec<_>>();
    assert_eq!(order(&log), ["x-p", "x-p", "x-p/1-a", "x-p"]);
    replay(
        played,
        ReplayOptions {
            max_turns: Some(1),
            ..options
        },
        |_| (),
    )
    .await
    .unwrap();
    assert_eq!(order(&log), ["x-p"], "the turn that called the agent is not played");
}

#[tokio::test]
async fn dropping_the_replay_ends_its_requests() {
    let (url, log) = serve(|_, _| Reply::Hang).await;
    let sessions = (0..3).map(|i| session(&format!("s{i}"), vec![turn(8, 0, 0)])).collect();
    let run = replay(trace(sessions), options(&url), |_| ());
    assert!(tokio::time::timeout(Duration::from_millis(500), run).await.is_err());
    let open = || log.lock().unwrap().iter().filter(|r| r.ended.is_none()).count();
    let begin = Instant::now();
    while open() > 0 {
        assert!(begin.elapsed() < Duration::from_secs(20), "a request is still open");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(log.lock().unwrap().len(), 3);
}

#[tokio::test]
async fn bad_options_are_named() {
    let good = || options("http://127.0.0.1:1");
    let t = || trace(vec![session("s", vec![turn(8, 0, 0)])]);
    for (options, word) in [
        (options("https://example.org"), "https"),
        (options("nonsense"), "nonsense"),
        (
            ReplayOptions {
                time_scale: 0.0,
                ..good()
            },
            "time_scale",
        ),
        (
            ReplayOptions {
                time_scale: f64::NAN,
                ..good()
            },
            "time_scale",
        ),
        (
            ReplayOptions {
                concurrency: 0,
                ..good()
            },
            "concurrency",
        ),
        (
            ReplayOptions {
                max_turns: Some(0),
                ..good()
            },
            "max_turns",
        ),
    ] {
        let error = replay(t(), options, |_| ()).await.unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}

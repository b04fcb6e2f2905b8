//! What every bus must do, asked of the simulated and of the real one with the same code.

#![allow(clippy::unwrap_used)] // only tests use it; clippy sees helpers outside #[test]

use std::time::Duration;

use bytes::Bytes;
use pinion_bus::{Bus, BusError, Headers, Message, Subscription};

pub const LONG: Duration = Duration::from_secs(5);

pub fn body(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

/// Answers everything on `pattern` with `<who>:<request>` and the request's headers, until dropped.
pub async fn answerer(
    bus: &(impl Bus + Clone + 'static),
    pattern: &str,
    queue: Option<&str>,
    who: &'static str,
) -> tokio::task::JoinHandle<()> {
    let mut asked = bus.subscribe(pattern, queue.map(str::to_owned)).await.unwrap();
    let bus = bus.clone();
    tokio::spawn(async move {
        while let Some(message) = asked.next().await {
            let text = format!("{who}:{}", String::from_utf8_lossy(&message.payload));
            bus.respond(&message, message.headers.clone(), body(&text))
                .await
                .unwrap();
        }
    })
}

/// Asks until the responder is registered at the server.
pub async fn ask(bus: &impl Bus, subject: &str, text: &str) -> Message {
    for _ in 0..200 {
        match bus
            .request(subject, Headers::new().with("schema", "1"), body(text), LONG)
            .await
        {
            Err(BusError::NoResponders { .. } | BusError::Disconnected) => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            answer => return answer.unwrap(),
        }
    }
    panic!("nobody ever answered on {subject}");
}

async fn next(subscription: &mut Subscription) -> Message {
    tokio::time::timeout(LONG, subscription.next())
        .await
        .expect("a message in time")
        .expect("an open subscription")
}

/// The shared suite. `a` and `b` are two connections to one bus without faults, with a key-value store, that takes messages of
/// `max` bytes.
pub async fn semantics(a: &(impl Bus + Clone + 'static), b: &(impl Bus + Clone + 'static), max: usize) {
    assert_eq!(
        a.request("t.nobody", Headers::new(), Bytes::new(), LONG)
            .await
            .unwrap_err(),
        BusError::NoResponders {
            subject: "t.nobody".to_owned()
        },
    );

    let echo = answerer(b, "t.echo.*", None, "b").await;
    let answer = ask(a, "t.echo.x", "hello").await;
    assert_eq!(
        (&answer.payload[..], answer.headers.get("schema")),
        (&b"b:hello"[..], Some("1"))
    );
    echo.abort();

    // A subscriber that never answers: the deadline counts, not the absence of responders.
    let mut silent = b.subscribe("t.silent", None).await.unwrap();
    let guard = answerer(b, "t.silent.ready", None, "b").await;
    ask(a, "t.silent.ready", "").await;
    let short = Duration::from_millis(150);
    let timed_out = a.request("t.silent", Headers::new(), body("?"), short).await;
    assert_eq!(timed_out.unwrap_err(), BusError::TimedOut { after: short });
    assert!(next(&mut silent).await.reply.is_some());
    guard.abort();

    // Wildcards, and order on one subject.
    let mut all = a.subscribe("t.w.>", None).await.unwrap();
    let mut one = a.subscribe("t.w.*", None).await.unwrap();
    for n in 0..20 {
        a.publish("t.w.x", Headers::new(), body(&n.to_string())).await.unwrap();
    }
    a.publish("t.w.x.y", Headers::new(), body("deep")).await.unwrap();
    for n in 0..20 {
        assert_eq!(next(&mut all).await.payload, body(&n.to_string()));
        assert_eq!(next(&mut one).await.payload, body(&n.to_string()));
    }
    assert_eq!(next(&mut all).await.subject, "t.w.x.y");
    let unanswerable = next_after(a, &mut all).await;
    assert!(matches!(
        a.respond(&unanswerable, Headers::new(), Bytes::new()).await,
        Err(BusError::NoReply { .. })
    ));

    // Of a queue group one member gets each message.
    let mut members = [
        a.subscribe("t.q", Some("g".to_owned())).await.unwrap(),
        a.subscribe("t.q", Some("g".to_owned())).await.unwrap(),
    ];
    for _ in 0..40 {
        a.publish("t.q", Headers::new(), body("m")).await.unwrap();
    }
    let mut got = 0;
    for member in &mut members {
        while tokio::time::timeout(Duration::from_millis(300), member.next())
            .await
            .is_ok()
        {
            got += 1;
        }
    }
    assert_eq!(got, 40);

    // Dropping unsubscribes.
    drop(all);
    drop(one);
    let mut gone = false;
    for _ in 0..100 {
        gone = matches!(
            a.request("t.w.x", Headers::new(), Bytes::new(), short).await,
            Err(BusError::NoResponders { .. })
        );
        if gone {
            break;
        }
    }
    assert!(gone, "dropped subscriptions still count as responders");

    refusals(a, max).await;
    key_values(a, b).await;
}

async fn next_after(bus: &impl Bus, subscription: &mut Subscription) -> Message {
    bus.publish("t.w.z", Headers::new(), body("z")).await.unwrap();
    next(subscription).await
}

async fn refusals(bus: &impl Bus, max: usize) {
    for bad in ["", "a..b", "a b", "a.*", "a.>"] {
        let refused = bus.publish(bad, Headers::new(), Bytes::new()).await;
        assert_eq!(
            refused,
            Err(BusError::BadSubject {
                subject: bad.to_owned()
            })
        );
    }
    assert!(matches!(
        bus.subscribe("a.>.b", None).await.map(drop),
        Err(BusError::BadSubject { .. })
    ));
    assert!(matches!(
        bus.subscribe("a", Some("g h".to_owned())).await.map(drop),
        Err(BusError::BadSubject { .. })
    ));
    assert!(matches!(bus.kv_get("a b").await, Err(BusError::BadSubject { .. })));
    let split = Headers::new().with("x", "a\r\nb");
    assert_eq!(bus.publish("t.h", split, Bytes::new()).await, Err(BusError::BadHeaders));
    let big = Bytes::from(vec![0; max + 1]);
    let too_large = BusError::TooLarge { got: max + 1, max };
    assert_eq!(
        bus.publish("t.big", Headers::new(), big.clone()).await,
        Err(too_large.clone())
    );
    assert_eq!(
        bus.request("t.big", Headers::new(), big.clone(), LONG).await,
        Err(too_large)
    );
    let fits = big.slice(..max - Headers::new().with("a", "b").wire_bytes());
    assert_eq!(bus.publish("t.big", Headers::new().with("a", "b"), fits).await, Ok(()));
}

/// Compare-and-set, with tombstones.
pub async fn key_values(a: &impl Bus, b: &impl Bus) {
    let wrong = |expected| BusError::WrongRevision {
        key: "s.1".to_owned(),
        expected,
    };
    assert_eq!(a.kv_get("s.1").await.unwrap(), None);
    assert_eq!(a.kv_keys("s.").await.unwrap(), []);
    let first = a.kv_create("s.1", body("one")).await.unwrap();
    assert_eq!(b.kv_create("s.1", body("other")).await, Err(wrong(0)));
    let second = b.kv_update("s.1", body("two"), first).await.unwrap();
    assert!(second > first);
    assert_eq!(a.kv_update("s.1", body("lost update"), first).await, Err(wrong(first)));
    let entry = a.kv_get("s.1").await.unwrap().unwrap();
    assert_eq!((entry.value, entry.revision), (body("two"), second));
    let other = a.kv_create("s.2", body("x")).await.unwrap();
    a.kv_create("t.1", body("x")).await.unwrap();
    assert_eq!(
        b.kv_keys("s.").await.unwrap(),
        [("s.1".to_owned(), second), ("s.2".to_owned(), other)]
    );
    assert_eq!(a.kv_delete("s.1", Some(first)).await, Err(wrong(first)));
    a.kv_delete("s.1", Some(second)).await.unwrap();
    assert_eq!(a.kv_get("s.1").await.unwrap(), None);
    assert_eq!(a.kv_keys("s.").await.unwrap(), [("s.2".to_owned(), other)]);
    assert_eq!(
        a.kv_update("s.1", body("late"), second).await,
        Err(wrong(second)),
        "the deletion has a revision too"
    );
    assert!(a.kv_create("s.1", body("again")).await.unwrap() > second);
    a.kv_delete("never-there", None).await.unwrap();
}

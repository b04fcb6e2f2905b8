//! Seeds whose pages have bytes, over real sockets and in real time. The engine is the simulated one; a page's bytes are its content
//! hash, again and again, so that a wrong page would make a wrong answer.

use pinion_actors::decode::{Decode, DecodeConfig};
use pinion_actors::engine::MovedPage;
use pinion_actors::prefill::{Prefill, PrefillConfig};
use pinion_actors::{Engine, EngineError, EngineOutput, Job};
use pinion_core::permits;
use pinion_gpu_agent::engine::sim::SimEngine;
use pinion_gpu_agent::world::{Cluster, Shape, cluster_id, expected, prompt};
use pinion_schemas::limits::DIRECT_APPEND_TOKENS_MAX;
use pinion_schemas::{BackupTargets, Epoch, Micros, PageHash, Path, RequestId, WorkerId};
use pinion_transfer::{Dtype, Grant, Inbox, Layout, PageRef, Paths, Pool, paths, shm, tcp};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::{TcpListener, UnixListener};

/// Slots of each pool: more than any context here has pages.
const SLOTS: u32 = 128;

/// The simulated engine with pages that have bytes.
struct Paged {
    sim: SimEngine,
    inbox: Inbox,
    /// Pages that came with bytes.
    came: Arc<AtomicU64>,
}

impl Paged {
    fn new(shape: &Shape, slots: u32, came: Arc<AtomicU64>) -> Self {
        let layout = Layout {
            model: 1,
            layers: 2,
            kv_heads: 2,
            head_dim: 64,
            page_tokens: shape.engine.page_tokens,
            dtype: Dtype::F16,
        };
        Self {
            sim: SimEngine::new(shape.engine.clone()),
            inbox: Inbox::new(Pool::new(layout, slots).unwrap(), Epoch(1)),
            came,
        }
    }
}

fn refused(error: pinion_transfer::grant::GrantError) -> EngineError {
    EngineError::NoRoom(error.to_string())
}

impl Engine for Paged {
    fn page_tokens(&self) -> u32 {
        self.sim.page_tokens()
    }
    fn page_bytes(&self) -> u64 {
        self.inbox.pool().page_bytes() as u64
    }
    fn has_bytes(&self) -> bool {
        true
    }
    fn pool_pages(&self) -> u64 {
        self.sim.pool_pages()
    }
    fn free_pages(&self) -> u64 {
        self.sim.free_pages()
    }
    fn submit(&mut self, now: Micros, job: Job) -> Result<u64, EngineError> {
        Engine::submit(&mut self.sim, now, job)
    }
    fn cancel(&mut self, request: RequestId) -> bool {
        Engine::cancel(&mut self.sim, request)
    }
    fn next_wakeup(&self) -> Option<Micros> {
        Engine::next_wakeup(&self.sim)
    }
    fn advance(&mut self, now: Micros) -> Vec<EngineOutput> {
        self.inbox.expire(now);
        Engine::advance(&mut self.sim, now)
    }
    fn resident(&self, chain: &[PageHash]) -> usize {
        self.sim.resident(chain)
    }
    fn pages(&self) -> Vec<PageHash> {
        self.sim.pages()
    }
    fn export(&self, _: &[PageHash]) -> Vec<MovedPage> {
        Vec::new()
    }
    fn import(&mut self, _: Option<PageHash>, pages: &[MovedPage]) -> Result<u64, EngineError> {
        assert!(pages.is_empty(), "pages without bytes");
        Ok(0)
    }
    fn export_pages(&self, chain: &[PageHash]) -> Vec<(PageHash, PageRef)> {
        let known = Engine::export(&self.sim, chain);
        let Ok(slots) = self.inbox.pool().take(known.len()) else {
            return Vec::new();
        };
        let filled = known.into_iter().zip(slots).map(|((name, content), mut slot)| {
            slot.chunks_exact_mut(8)
                .for_each(|part| part.copy_from_slice(&content.to_le_bytes()));
            (name, slot.finish())
        });
        filled.collect()
    }
    fn grant(&mut self, pages: u32, key: u64, deadline: Micros) -> Result<Grant, EngineError> {
        self.inbox.grant(pages as usize, key, deadline).map_err(refused)
    }
    fn import_granted(&mut self, grant: u64, parent: Option<PageHash>, names: &[PageHash]) -> Result<u64, EngineError> {
        let came = self.inbox.take(grant).into_iter().map_while(|page| page);
        let content = |page: PageRef| {
            let (first, _) = page.split_first_chunk().unwrap();
            assert!(page.chunks_exact(8).all(|part| part == first), "half a page");
            u64::from_le_bytes(*first)
        };
        let moved: Vec<MovedPage> = names.iter().copied().zip(came.map(content)).collect();
        self.came.fetch_add(moved.len() as u64, Ordering::SeqCst);
        Engine::import(&mut self.sim, parent, &moved)
    }
    fn queued_tokens(&self) -> u64 {
        self.sim.queued_tokens()
    }
    fn running(&self) -> u32 {
        Engine::running(&self.sim)
    }
}

/// A cluster, and the pools of its workers.
struct Rig {
    cluster: Cluster,
    pools: Vec<Pool>,
    shape: Shape,
    came: Arc<AtomicU64>,
}

impl Rig {
    async fn new() -> Self {
        Self::with(BackupTargets::Off).await
    }

    async fn with(backups: BackupTargets) -> Self {
        let shape = Shape {
            backups,
            prefill: 0,
            decode: 0,
            ..Shape::default()
        };
        Self {
            cluster: Cluster::start(shape.clone()).await.unwrap(),
            pools: Vec::new(),
            shape,
            came: Arc::default(),
        }
    }

    async fn prefill(&mut self, name: &str, slots: u32, addresses: fn(Inbox) -> Vec<String>) {
        let engine = Paged::new(&self.shape, slots, self.came.clone());
        let pool = engine.inbox.pool().clone();
        let config = PrefillConfig {
            cluster: cluster_id(),
            worker: WorkerId::new(name).unwrap(),
            epoch: Epoch(1),
            link: self.shape.engine.cost.link(),
            addresses: addresses(engine.inbox.clone()),
            secret: 4,
        };
        let paths = Some(Arc::new(Paths::new(&pool)));
        self.pools.push(pool);
        self.cluster
            .worker_as(name, Prefill::new(config, engine), paths)
            .await
            .unwrap();
    }

    async fn decode(&mut self, name: &str, slots: u32, addresses: impl FnOnce(Inbox) -> Vec<String>) {
        let engine = Paged::new(&self.shape, slots, self.came.clone());
        let pool = engine.inbox.pool().clone();
        let paths = Some(Arc::new(Paths::new(&pool)));
        self.pools.push(pool);
        let config = DecodeConfig {
            cluster: cluster_id(),
            worker: WorkerId::new(name).unwrap(),
            epoch: Epoch(1),
            direct_append_tokens_max: DIRECT_APPEND_TOKENS_MAX,
            permits: permits::Config::default(),
            link: self.shape.engine.cost.link(),
            addresses: addresses(engine.inbox.clone()),
            secret: 5,
        };
        self.cluster
            .worker_as(name, Decode::new(config, engine), paths)
            .await
            .unwrap();
    }

    /// Two turns of a session: the first needs a seed, the second does not; both are right, and in the end every slot is free. Returns
    /// the pages that came over the transfer plane.
    async fn two_turns(&self) -> u64 {
        // Until the heartbeats have told of the workers.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let mut context = prompt(1, 900);
        for turn in 0..2 {
            let answer = self.cluster.submit("s", context.clone(), 8).await.unwrap();
            assert_eq!(answer.tokens, expected(&context, 8), "turn {turn}");
            assert_eq!(answer.path, if turn == 0 { Path::Seed } else { Path::Direct });
            context.extend(answer.tokens);
            context.extend(prompt(2, 30));
        }
        self.rests().await;
        self.came.load(Ordering::SeqCst)
    }

    async fn rests(&self) {
        for _ in 0..500 {
            if self.pools.iter().all(|p| p.usage().free == p.capacity()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("not free: {:?}", self.pools.iter().map(Pool::usage).collect::<Vec<_>>());
    }
}

fn real<F: Future>(run: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.unwrap().block_on(run)
}

fn over_tcp(inbox: Inbox) -> Vec<String> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let listener = TcpListener::from_std(listener).unwrap();
    let at = listener.local_addr().unwrap();
    tokio::spawn(tcp::serve(listener, inbox));
    vec![format!("tcp://{at}")]
}

fn over_shm(inbox: Inbox) -> Vec<String> {
    let path = std::env::temp_dir().join(format!("pinion-pages-{}.sock", std::process::id()));
    let _ = std::fs::remove_file(&path);
    tokio::spawn(shm::serve(UnixListener::bind(&path).unwrap(), inbox));
    vec![format!("shm://{}{}", paths::host().unwrap(), path.display())]
}

/// Full pages of the first context: 900 tokens in pages of 16.
const PAGES: u64 = 56;

#[test]
fn the_pages_of_a_seed_come_over_tcp() {
    real(async {
        let mut rig = Rig::new().await;
        rig.prefill("p0", SLOTS, over_tcp).await;
        rig.decode("d0", SLOTS, over_tcp).await;
        assert_eq!(rig.two_turns().await, PAGES);
    });
}

#[test]
fn or_through_shared_memory() {
    real(async {
        let mut rig = Rig::new().await;
        rig.prefill("p0", SLOTS, over_tcp).await;
        // The other way is wrong: it is not needed.
        let both = |inbox: Inbox| [vec!["tcp://127.0.0.1:1".to_owned()], over_shm(inbox)].concat();
        rig.decode("d0", SLOTS, both).await;
        assert_eq!(rig.two_turns().await, PAGES);
    });
}

#[test]
fn pages_that_do_not_get_there_are_computed_there() {
    real(async {
        let nowhere: [fn(Inbox) -> Vec<String>; 2] =
            [|_| Vec::new(), |_| vec!["tcp://127.0.0.1:1".into(), "rubbish".into()]];
        for addresses in nowhere {
            let mut rig = Rig::new().await;
            rig.prefill("p0", SLOTS, over_tcp).await;
            rig.decode("d0", SLOTS, addresses).await;
            assert_eq!(rig.two_turns().await, 0);
        }
    });
}

#[test]
fn a_pool_without_room_takes_no_pages_and_serves_all_the_same() {
    real(async {
        let mut rig = Rig::new().await;
        rig.prefill("p0", SLOTS, over_tcp).await;
        rig.decode("d0", 8, over_tcp).await;
        assert_eq!(rig.two_turns().await, 0);
    });
}

/// Its peer listens and never answers, so that it is for certain killed in the middle of its transfer.
#[test]
fn a_prefill_worker_killed_while_it_sends_costs_no_turn_and_no_slot() {
    real(async {
        let mut rig = Rig::new().await;
        rig.prefill("p0", SLOTS, over_tcp).await;
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = silent.local_addr().unwrap();
        rig.decode("d0", SLOTS, |_| vec![format!("tcp://{at}")]).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let context = prompt(1, 900);
        let turn = tokio::spawn(rig.cluster.submit("s", context.clone(), 8));
        while rig.pools[1].usage().writing == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        rig.prefill("p1", SLOTS, over_tcp).await;
        rig.cluster.kill("p0").unwrap();
        let answer = turn.await.unwrap().unwrap();
        assert_eq!(answer.tokens, expected(&context, 8));
        rig.rests().await;
    });
}

/// What a turn adds goes back to the prefill worker, from where it comes again when the decode worker is gone.
#[test]
fn backups_have_bytes_too() {
    real(async {
        let mut rig = Rig::with(BackupTargets::LastPrefill).await;
        rig.prefill("p0", SLOTS, over_tcp).await;
        rig.decode("d0", SLOTS, over_tcp).await;
        rig.two_turns().await;
        // 900 + 8 + 30 + 8 tokens: three pages that no seed has brought.
        for _ in 0..500 {
            if rig.came.load(Ordering::SeqCst) == PAGES + 3 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(rig.came.load(Ordering::SeqCst), PAGES + 3);
        rig.cluster.kill("d0").unwrap();
        rig.decode("d1", SLOTS, over_tcp).await;
        let first = prompt(1, 900);
        let second = [&first[..], &expected(&first, 8), &prompt(2, 30)].concat();
        let third = [&second[..], &expected(&second, 8), &prompt(3, 100)].concat();
        let answer = rig.cluster.submit("s", third.clone(), 8).await.unwrap();
        assert_eq!(answer.tokens, expected(&third, 8));
        assert_eq!(answer.path, Path::Reseed);
        // All pages of 1,046 tokens, of which six were computed now.
        assert_eq!(rig.came.load(Ordering::SeqCst), PAGES + 3 + 65);
        rig.rests().await;
    });
}

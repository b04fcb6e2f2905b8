//! The one shell of all actors: ractor gives it a mailbox, it gives the role inputs and performs the role's effects.
//!
//! `handle` never waits: subscriptions, requests and the timer are tasks of their own that put what they get into the
//! mailbox, and one writer task sends in the order of the effects. ractor's mailboxes have no bound, so the shell bounds
//! what it feeds them: [`INBOX_MAX`] messages under way, then subscriptions wait and the bus's own bound applies.

use crate::effect::{Effect, Effects, Input, Local, Role};
use crate::store::Store;
use futures::FutureExt as _;
use pinion_bus::{Bus, BusError, Headers};
use pinion_schemas::Micros;
use pinion_transfer::{Address, MoveError, Paths};
use ractor::{Actor, ActorProcessingErr, ActorRef};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Bus messages in the mailbox of one actor: more than any burst of one node, little enough to be worked off in a second.
const INBOX_MAX: usize = 4_096;
/// Between two looks at whether the bus has caught up.
const BEHIND: Duration = Duration::from_millis(5);
/// Messages waiting to be sent; beyond it the newest is dropped and counted, as core NATS would do.
const OUTBOX_MAX: usize = 16_384;
/// How long one publish may take while the bus is down, before it is given up.
const PUBLISH_PATIENCE: Duration = Duration::from_secs(2);

/// Actors of one process that talk to each other by name.
#[derive(Clone, Default)]
pub struct Directory(Arc<Mutex<HashMap<String, ActorRef<Envelope>>>>);

impl Directory {
    fn insert(&self, name: String, actor: ActorRef<Envelope>) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(name, actor);
    }
    /// Tells an actor; one that is not there is not told.
    pub fn tell(&self, name: &str, local: Local) {
        let actor = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned();
        if let Some(actor) = actor {
            let _ = actor.cast(Envelope::local(local));
        }
    }
}

/// What the mailbox holds.
pub struct Envelope {
    input: Input,
    /// Counts against [`INBOX_MAX`] until it is handled.
    _slot: Option<OwnedSemaphorePermit>,
    /// Generation of the timer, for ticks.
    timer: Option<u64>,
}

impl Envelope {
    fn new(input: Input) -> Self {
        Self {
            input,
            _slot: None,
            timer: None,
        }
    }
    fn local(local: Local) -> Self {
        Self::new(Input::Local(local))
    }
}

#[cfg(test)]
impl std::fmt::Debug for Envelope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.input.fmt(f)
    }
}

/// What an actor needs of its process.
#[derive(Clone)]
pub struct Context {
    /// The bus.
    pub bus: Arc<dyn Bus>,
    /// The other actors.
    pub directory: Directory,
    /// Point of the clock that is [`Micros::ZERO`].
    pub origin: Instant,
    /// How pages leave, for workers whose pages have bytes.
    pub paths: Option<Arc<Paths>>,
    /// While it says `true` nothing is handled: a simulation stops a process by it, as a garbage collector would.
    pub stopped: Option<watch::Receiver<bool>>,
}

impl Context {
    /// A context whose time starts now.
    pub fn new(bus: Arc<dyn Bus>) -> Self {
        Self {
            bus,
            directory: Directory::default(),
            origin: Instant::now(),
            paths: None,
            stopped: None,
        }
    }

    /// Waits while the process is stopped.
    pub(crate) async fn awake(&self) {
        if let Some(stopped) = &self.stopped
            && *stopped.borrow()
        {
            // Whoever stopped it and went away cannot let it go on: then it does.
            let _ = stopped.clone().wait_for(|stopped| !stopped).await;
        }
    }

    /// Now.
    pub fn now(&self) -> Micros {
        Micros(self.origin.elapsed().as_micros() as u64)
    }
}

struct Shell<R>(std::marker::PhantomData<fn() -> R>);

struct State<R> {
    role: R,
    context: Context,
    outbox: mpsc::Sender<Outgoing>,
    /// Messages that the writer has or is to get.
    unsent: Arc<AtomicUsize>,
    writer: JoinHandle<()>,
    store: Store,
    inbox: Arc<Semaphore>,
    subscriptions: HashMap<String, JoinHandle<()>>,
    timer: Option<(Micros, Option<JoinHandle<()>>)>,
    generation: u64,
    dropped: u64,
}

enum Outgoing {
    Publish(String, bytes::Bytes),
    Respond(pinion_bus::Message, bytes::Bytes),
}

/// Starts `role` as an actor called `name`. It ends when the actor is stopped.
///
/// # Errors
/// If the name is taken in this process.
pub async fn spawn<R: Role>(
    name: &str,
    role: R,
    context: Context,
) -> Result<(ActorRef<Envelope>, JoinHandle<()>), ractor::SpawnErr> {
    let (actor, handle) = Actor::spawn(None, Shell(std::marker::PhantomData), (role, context.clone())).await?;
    context.directory.insert(name.to_owned(), actor.clone());
    Ok((actor, handle))
}

impl<R: Role> Actor for Shell<R> {
    type Msg = Envelope;
    type State = State<R>;
    type Arguments = (R, Context);

    async fn pre_start(
        &self,
        myself: ActorRef<Envelope>,
        (role, context): Self::Arguments,
    ) -> Result<State<R>, ActorProcessingErr> {
        let (outbox, waiting) = mpsc::channel(OUTBOX_MAX);
        let unsent = Arc::<AtomicUsize>::default();
        let writer = tokio::spawn(write(context.bus.clone(), waiting, unsent.clone()));
        let mut state = State {
            role,
            store: Store::new(context.bus.clone()),
            context,
            outbox,
            unsent,
            writer,
            inbox: Arc::new(Semaphore::new(INBOX_MAX)),
            subscriptions: HashMap::new(),
            timer: None,
            generation: 0,
            dropped: 0,
        };
        let mut out = Effects::default();
        let now = state.context.now();
        let to_wake = myself.clone();
        state.role.wake_with(Arc::new(move || {
            let _ = to_wake.cast(Envelope::new(Input::Tick));
        }));
        state.role.start(now, &mut out);
        // Subscriptions of the start stand before anybody can know of the actor.
        for effect in out.0 {
            if let Effect::Subscribe(pattern) = effect {
                state.subscribe(&myself, pattern).await;
            } else {
                state.perform(&myself, effect);
            }
        }
        state.arm(&myself, now);
        Ok(state)
    }

    async fn handle(
        &self,
        myself: ActorRef<Envelope>,
        envelope: Envelope,
        state: &mut State<R>,
    ) -> Result<(), ActorProcessingErr> {
        state.context.awake().await;
        if envelope.timer.is_some_and(|g| g != state.generation) {
            return Ok(());
        }
        if envelope.timer.is_some() {
            state.timer = None;
        }
        let mut out = Effects::default();
        let now = state.context.now();
        state.role.handle(now, envelope.input, &mut out);
        for effect in out.0 {
            state.perform(&myself, effect);
        }
        state.arm(&myself, now);
        Ok(())
    }

    async fn post_stop(&self, _: ActorRef<Envelope>, state: &mut State<R>) -> Result<(), ActorProcessingErr> {
        state.writer.abort();
        for task in state.subscriptions.values() {
            task.abort();
        }
        if let Some((_, Some(task))) = &state.timer {
            task.abort();
        }
        Ok(())
    }
}

impl<R: Role> State<R> {
    fn perform(&mut self, myself: &ActorRef<Envelope>, effect: Effect) {
        match effect {
            Effect::Publish(subject, payload) => self.send(Outgoing::Publish(subject, payload)),
            Effect::Respond(to, payload) => self.send(Outgoing::Respond(to, payload)),
            Effect::Request {
                token,
                subject,
                payload,
                deadline,
            } => {
                let (bus, myself) = (self.context.bus.clone(), myself.clone());
                let (behind, unsent) = (self.unsent.load(Ordering::Acquire) > 0, self.unsent.clone());
                let mut asking = Box::pin(async move {
                    // What was to be sent before it goes first, if the bus is behind.
                    while behind && unsent.load(Ordering::Acquire) > 0 {
                        tokio::time::sleep(BEHIND).await;
                    }
                    let result = bus.request(&subject, Headers::new(), payload, deadline).await;
                    let _ = myself.cast(Envelope::new(Input::Reply { token, result }));
                });
                // On its way before the effects behind it: an abort must not overtake what it aborts.
                if asking.as_mut().now_or_never().is_none() {
                    tokio::spawn(asking);
                }
            }
            Effect::Send {
                token,
                to,
                grant,
                pages,
                patience,
            } => {
                let (paths, myself) = (self.context.paths.clone(), myself.clone());
                tokio::spawn(async move {
                    let to: Vec<Address> = to.iter().filter_map(|a| a.parse().ok()).collect();
                    let result = match paths {
                        Some(paths) => paths.send(&to, &grant, &pages, patience).await,
                        None => Err(MoveError::NoPath),
                    };
                    // The pages may go before the role hears: it must not find them still in use.
                    drop(pages);
                    let _ = myself.cast(Envelope::new(Input::Sent { token, result }));
                });
            }
            Effect::Subscribe(pattern) => {
                let task = tokio::spawn(listen(
                    self.context.bus.clone(),
                    pattern.clone(),
                    self.inbox.clone(),
                    myself.clone(),
                ));
                if let Some(old) = self.subscriptions.insert(pattern, task) {
                    old.abort();
                }
            }
            Effect::Tell(name, local) => self.context.directory.tell(&name, local),
            Effect::Get { token, key, deadline } => {
                let (bus, myself) = (self.context.bus.clone(), myself.clone());
                tokio::spawn(async move {
                    let read = tokio::time::timeout(deadline, bus.kv_get(&key)).await;
                    let value = match read {
                        Ok(Ok(entry)) => entry.map(|e| e.value),
                        Ok(Err(error)) => {
                            tracing::debug!(%key, %error, "not read");
                            None
                        }
                        Err(_) => None,
                    };
                    let _ = myself.cast(Envelope::new(Input::Got { token, value }));
                });
            }
            Effect::Put(key, epoch, value) => self.store.put(key, epoch, value),
        }
    }

    /// Sends in order. A bus that takes the message at once, as it does unless it is down or behind, costs no task a wake-up;
    /// else the writer waits for it.
    fn send(&mut self, outgoing: Outgoing) {
        if self.unsent.load(Ordering::Acquire) == 0 {
            let bus = self.context.bus.as_ref();
            // Dropped before it is done, it has not been sent.
            if let Some(sent) = publish(bus, &outgoing).now_or_never() {
                return log_unsent(sent);
            }
        }
        self.unsent.fetch_add(1, Ordering::AcqRel);
        if self.outbox.try_send(outgoing).is_err() {
            self.unsent.fetch_sub(1, Ordering::AcqRel);
            self.dropped += 1;
            if self.dropped.is_power_of_two() {
                tracing::warn!(
                    dropped = self.dropped,
                    "the bus takes messages too slowly: newest dropped"
                );
            }
        }
    }

    /// Subscribes before it returns.
    async fn subscribe(&mut self, myself: &ActorRef<Envelope>, pattern: String) {
        match self.context.bus.subscribe(&pattern, None).await {
            Ok(subscription) => {
                let task = tokio::spawn(forward(subscription, self.inbox.clone(), myself.clone()));
                self.subscriptions.insert(pattern, task);
            }
            Err(error) => {
                tracing::warn!(%pattern, %error, "not subscribed yet");
                self.perform(myself, Effect::Subscribe(pattern));
            }
        }
    }

    /// Sees to it that the role's next deadline is kept; `handled` is the time it was last told.
    fn arm(&mut self, myself: &ActorRef<Envelope>, handled: Micros) {
        let due = self.role.next_deadline();
        if due == self.timer.as_ref().map(|t| t.0) {
            return;
        }
        if let Some((_, Some(task))) = self.timer.take() {
            task.abort();
        }
        self.generation += 1;
        let Some(due) = due else { return };
        let (generation, myself) = (self.generation, myself.clone());
        let tick = move || {
            let _ = myself.cast(Envelope {
                input: Input::Tick,
                _slot: None,
                timer: Some(generation),
            });
        };
        // What fell due while the role worked is done next: tokio's timers would round it up to a millisecond or two. With
        // the clock of a simulation nothing falls due meanwhile.
        if due > handled && due <= self.context.now() {
            tick();
            self.timer = Some((due, None));
            return;
        }
        // One microsecond is the smallest step, so that a deadline that stays due cannot stop the clock.
        let at = (self.context.origin + Duration::from_micros(due.0)).max(Instant::now() + Duration::from_micros(1));
        let task = tokio::spawn(async move {
            tokio::time::sleep_until(at).await;
            tick();
        });
        self.timer = Some((due, Some(task)));
    }
}

async fn publish(bus: &dyn Bus, outgoing: &Outgoing) -> Result<(), BusError> {
    match outgoing {
        Outgoing::Publish(subject, payload) => bus.publish(subject, Headers::new(), payload.clone()).await,
        Outgoing::Respond(to, payload) => bus.respond(to, Headers::new(), payload.clone()).await,
    }
}

fn log_unsent(sent: Result<(), BusError>) {
    if let Err(error) = sent {
        tracing::debug!(%error, "message not sent");
    }
}

/// Sends in order. A message that does not get out in [`PUBLISH_PATIENCE`] is lost, as on core NATS anything may be.
async fn write(bus: Arc<dyn Bus>, mut waiting: mpsc::Receiver<Outgoing>, unsent: Arc<AtomicUsize>) {
    while let Some(outgoing) = waiting.recv().await {
        if let Ok(sent) = tokio::time::timeout(PUBLISH_PATIENCE, publish(bus.as_ref(), &outgoing)).await {
            log_unsent(sent);
        } else {
            tracing::debug!("message not sent: the bus is down");
        }
        unsent.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Subscribes, again and again until it works, and forwards.
async fn listen(bus: Arc<dyn Bus>, pattern: String, inbox: Arc<Semaphore>, to: ActorRef<Envelope>) {
    loop {
        match bus.subscribe(&pattern, None).await {
            Ok(subscription) => return forward(subscription, inbox, to).await,
            Err(error) => {
                tracing::warn!(%pattern, %error, "not subscribed yet");
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
}

async fn forward(mut subscription: pinion_bus::Subscription, inbox: Arc<Semaphore>, to: ActorRef<Envelope>) {
    while let Some(message) = subscription.next().await {
        let Ok(slot) = inbox.clone().acquire_owned().await else {
            return;
        };
        let envelope = Envelope {
            input: Input::Message(message),
            _slot: Some(slot),
            timer: None,
        };
        if to.cast(envelope).is_err() {
            return;
        }
    }
}

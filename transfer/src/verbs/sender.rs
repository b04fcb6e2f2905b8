//! The sender: its pool registered once for each device, connections kept, pages written where the peer says.

use super::device::{Devices, down};
use super::ffi::Registered;
use super::lane::{Lane, Piece};
use super::wire::{NOWHERE, Target, encode_ends, read_ends, read_targets};
use super::{EndsOnThread, PIECE_BYTES, life_line, on_thread};
use crate::frame::{FrameError, PageState};
use crate::grant::Grant;
use crate::pool::{PageRef, Pool};
use crate::send::{HELLO_PATIENCE, Placed, SendError, Transport, announce, exchange_hello, read_states, read_taken};
use crate::serve::BATCH_PATIENCE;
use futures::future::try_join_all;
use sideway::ibverbs::AccessFlags;
use sideway::ibverbs::protection_domain::ProtectionDomain;
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Idle connections kept: those of 64 peers.
const IDLE_MAX: usize = 64;

/// The pool, as one device reads it.
#[derive(Debug)]
struct Source {
    memory: Registered,
    domain: Arc<ProtectionDomain>,
}

/// All of them; the pool is mapped as long as they are.
#[derive(Debug)]
pub(super) struct Sources {
    each: Vec<Source>,
    pool: Pool,
}

/// Sends pages of a pool.
#[derive(Debug)]
pub struct VerbsSender {
    pool: Pool,
    devices: Devices,
    sources: EndsOnThread<Arc<Sources>>,
    idle: Mutex<HashMap<SocketAddr, Vec<Link>>>,
}

impl VerbsSender {
    /// A sender over these devices. It pins the pool's memory.
    ///
    /// # Errors
    /// A device does not take the memory, for want of `ulimit -l` say.
    pub async fn new(pool: Pool, devices: &Devices) -> io::Result<Self> {
        let (mine, theirs) = (pool.clone(), devices.clone());
        let sources = on_thread(move || sources(mine, &theirs)).await??;
        Ok(Self {
            pool,
            devices: devices.clone(),
            sources: EndsOnThread::new(Arc::new(sources)),
            idle: Mutex::default(),
        })
    }

    #[cfg(test)]
    pub(super) fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }

    async fn connect(&self, to: SocketAddr) -> Result<Link, SendError> {
        let work = async {
            let mut stream = TcpStream::connect(to).await?;
            life_line(&stream)?;
            exchange_hello(&mut stream, &self.pool).await?;
            let (devices, sources) = (self.devices.clone(), Arc::clone(&self.sources));
            let mut work = on_thread(move || Work::new(&devices, sources)).await??;
            let ours: Vec<_> = work.lanes.iter().zip(&*self.devices.0).map(|(l, d)| l.end(d)).collect();
            stream.write_all(&encode_ends(&ours)).await?;
            let theirs = read_ends(&mut stream).await??;
            if theirs.len() != ours.len() {
                return Err(FrameError::Lanes(theirs.len() as u32).into());
            }
            let devices = self.devices.clone();
            let work = on_thread(move || {
                for ((lane, device), their) in work.lanes.iter_mut().zip(&*devices.0).zip(&theirs) {
                    lane.connect(device, their)?;
                    lane.ready_to_send()?;
                }
                Ok::<_, io::Error>(work)
            });
            Ok(Link {
                stream,
                work: work.await??,
                batches: 0,
            })
        };
        timeout(HELLO_PATIENCE, work)
            .await
            .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
    }

    fn idle(&self, to: SocketAddr) -> Option<Link> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let links = idle.get_mut(&to)?;
        links.retain(Link::is_alive);
        links.pop()
    }

    fn keep(&self, to: SocketAddr, link: Link) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.values().map(Vec::len).sum::<usize>() >= IDLE_MAX {
            idle.clear();
        }
        idle.entry(to).or_default().push(link);
    }
}

fn sources(pool: Pool, devices: &Devices) -> io::Result<Sources> {
    let (at, bytes) = pool.span();
    let source = |device: &super::device::Device| {
        let domain = device.context.alloc_pd().map_err(io::Error::other)?;
        #[allow(unsafe_code, reason = "a device reads the memory")]
        // SAFETY: the pool stays mapped as long as `Sources`, and without any access flag the device only reads.
        let memory = unsafe { Registered::new(&domain, at, bytes, AccessFlags::none()) };
        let why = |e: io::Error| {
            let text = format!(
                "{} cannot read the page pool of {bytes} bytes: {e}; see ulimit -l",
                device.name
            );
            io::Error::new(e.kind(), text)
        };
        Ok(Source {
            memory: memory.map_err(why)?,
            domain,
        })
    };
    Ok(Sources {
        each: devices.0.iter().map(source).collect::<io::Result<_>>()?,
        pool,
    })
}

impl Transport for VerbsSender {
    type Address = SocketAddr;

    async fn send(&self, to: &SocketAddr, grant: &Grant, pages: &[Placed]) -> Result<Vec<PageState>, SendError> {
        let work = async {
            let mut link = match self.idle(*to) {
                Some(link) => link,
                None => self.connect(*to).await?,
            };
            let states = timeout(BATCH_PATIENCE, link.send(grant, pages))
                .await
                .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))?;
            self.keep(*to, link);
            Ok(states)
        };
        tokio::select! {
            biased;
            port = down(&self.devices) => Err(port.into()),
            states = work => states,
        }
    }
}

/// A connection.
#[derive(Debug)]
struct Link {
    stream: TcpStream,
    work: EndsOnThread<Work>,
    batches: u32,
}

/// What devices use, in the order in which it must end.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) lanes: Vec<Lane>,
    /// The pages that are being written out: they must stay what they are until the lanes are done with them, or have ended.
    pub(super) pages: Vec<PageRef>,
    sources: Arc<Sources>,
}

impl Work {
    pub(super) fn new(devices: &Devices, sources: Arc<Sources>) -> io::Result<EndsOnThread<Self>> {
        // The peer may do nothing over these.
        let lane = |(device, source): (_, &Source)| Lane::new(device, &source.domain, AccessFlags::none());
        let lanes = devices
            .0
            .iter()
            .zip(&sources.each)
            .map(lane)
            .collect::<io::Result<_>>()?;
        Ok(EndsOnThread::new(Self {
            lanes,
            pages: Vec::new(),
            sources,
        }))
    }

    #[cfg(test)]
    pub(super) fn lkey(&self, lane: usize) -> u32 {
        self.sources.each[lane].memory.lkey()
    }

    /// Writes each page to its target, if it has one, and commits.
    async fn write(&mut self, targets: &[Target], number: u32) -> Result<(), SendError> {
        let last = self.lanes.len() as u32;
        if let Some(wrong) = targets.iter().find(|t| t.lane >= last && t.lane != NOWHERE) {
            return Err(FrameError::Lanes(wrong.lane).into());
        }
        let (start, _) = self.sources.pool.span();
        let lanes = self.lanes.iter_mut().zip(&self.sources.each).enumerate();
        let writes = lanes.map(|(lane_number, (lane, source))| {
            let here = targets
                .iter()
                .zip(&self.pages)
                .filter(|(t, _)| t.lane == lane_number as u32);
            let pieces: Vec<Piece> = here
                .flat_map(|(target, page)| pieces(start + page.offset(), target, page.len()))
                .collect();
            async move {
                if pieces.is_empty() {
                    return Ok(());
                }
                #[allow(unsafe_code, reason = "a device reads the memory")]
                // SAFETY: the pages are kept in `self.pages` until all writes are done, or the lanes have ended.
                unsafe {
                    lane.write(&pieces, source.memory.lkey(), number).await
                }
            }
        });
        try_join_all(writes).await?;
        Ok(())
    }
}

fn pieces(from: u64, target: &Target, bytes: usize) -> impl Iterator<Item = Piece> {
    let target = *target;
    (0..bytes).step_by(PIECE_BYTES).map(move |at| Piece {
        from: from + at as u64,
        bytes: PIECE_BYTES.min(bytes - at) as u32,
        to: target.at.wrapping_add(at as u64),
        rkey: target.rkey,
    })
}

impl Link {
    /// A peer says nothing between batches: what can be read is its end.
    fn is_alive(&self) -> bool {
        matches!(self.stream.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    async fn send(&mut self, grant: &Grant, pages: &[Placed]) -> Result<Vec<PageState>, SendError> {
        self.stream.write_all(&announce(grant, pages)).await?;
        read_taken(&mut self.stream).await?;
        let targets = read_targets(&mut self.stream, pages.len()).await??;
        self.work.pages = pages.iter().map(|(_, page)| page.clone()).collect();
        // Read beside: a peer that ends makes writing the rest pointless.
        let (states, ()) = tokio::try_join!(
            read_states(&mut self.stream, pages.len()),
            self.work.write(&targets, self.batches)
        )?;
        self.work.pages.clear();
        self.batches = self.batches.wrapping_add(1);
        Ok(states)
    }
}

//! The receiver: opens slots to its peer's device for one batch, and judges them when the device can write no more.

use super::device::{Devices, down};
use super::ffi::Registered;
use super::lane::Lane;
use super::wire::{End, Target, encode_ends, encode_targets, read_ends};
use super::{EndsOnThread, life_line, on_thread};
use crate::frame::{Entry, PageState};
use crate::grant::Inbox;
use crate::layout::digest;
use crate::send::{HELLO_PATIENCE, SendError, exchange_hello};
use crate::serve::{self, BATCH_PATIENCE, Batch, next_batch, report, within};
use futures::future::try_join_all;
use sideway::ibverbs::AccessFlags;
use sideway::ibverbs::protection_domain::ProtectionDomain;
use std::io;
use std::sync::Arc;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

/// Takes pages from peers into the slots that were granted to them, until dropped.
pub async fn serve(listener: TcpListener, inbox: Inbox, devices: Devices) {
    let next = || async {
        let stream = listener.accept().await?.0;
        life_line(&stream)?;
        Ok(stream)
    };
    serve::accept(next, |stream| {
        let (inbox, devices) = (inbox.clone(), devices.clone());
        async move {
            tokio::select! {
                ended = connection(stream, &inbox, &devices) => ended,
                port = down(&devices) => Err(port.into()),
            }
        }
    })
    .await;
}

/// What devices use, in the order in which it must end: over a lane that has ended nothing is written, whatever was half-way.
#[derive(Debug)]
struct Work {
    lanes: Vec<Lane>,
    /// The batch under way.
    open: Option<Exposed>,
    /// Where the keys of the lanes' peers are good.
    domains: Vec<Arc<ProtectionDomain>>,
}

async fn connection(mut stream: TcpStream, inbox: &Inbox, devices: &Devices) -> Result<(), SendError> {
    exchange_hello(&mut stream, inbox.pool()).await?;
    let mut work = timeout(HELLO_PATIENCE, connect(&mut stream, devices))
        .await
        .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))?;
    let page_bytes = inbox.pool().page_bytes();
    let mut number = 0_u32;
    while let Some(batch) = next_batch(&mut stream, inbox).await? {
        let domains = work.domains.clone();
        let open = on_thread(move || Exposed::new(batch, &domains, page_bytes)).await??;
        let targets = work.open.insert(open).targets.clone();
        within(stream.write_all(&encode_targets(&targets))).await?;
        let all = async {
            tokio::select! {
                all = committed(&mut work.lanes, &targets, number) => all,
                error = broken(&stream) => Err(error),
            }
        };
        timeout(BATCH_PATIENCE, all)
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
        let open = work.open.take();
        let states = on_thread(move || open.map_or_else(|| Ok(Vec::new()), Exposed::judge)).await??;
        report(&mut stream, &states).await?;
        number = number.wrapping_add(1);
    }
    Ok(())
}

/// Makes an end for each of the peer's lanes, over one device after the other, and tells it.
async fn connect(stream: &mut TcpStream, devices: &Devices) -> Result<EndsOnThread<Work>, SendError> {
    let theirs = read_ends(stream).await??;
    let devices = devices.clone();
    let (work, ours) = on_thread(move || make_ends(&devices, &theirs)).await??;
    stream.write_all(&encode_ends(&ours)).await?;
    Ok(work)
}

fn make_ends(devices: &Devices, theirs: &[End]) -> io::Result<(EndsOnThread<Work>, Vec<End>)> {
    let (mut lanes, mut domains, mut ours) = (Vec::new(), Vec::new(), Vec::new());
    for (device, their) in devices.0.iter().cycle().zip(theirs) {
        let domain = device.context.alloc_pd().map_err(io::Error::other)?;
        let mut lane = Lane::new(device, &domain, AccessFlags::RemoteWrite | AccessFlags::LocalWrite)?;
        lane.connect(device, their)?;
        lane.post_receives()?;
        ours.push(lane.end(device));
        lanes.push(lane);
        domains.push(domain);
    }
    let work = Work {
        lanes,
        open: None,
        domains,
    };
    Ok((EndsOnThread::new(work), ours))
}

/// All lanes that got pages have committed them.
async fn committed(lanes: &mut [Lane], targets: &[Target], number: u32) -> io::Result<()> {
    let used = lanes
        .iter_mut()
        .enumerate()
        .filter(|(at, _)| targets.iter().any(|t| t.lane == *at as u32));
    try_join_all(used.map(|(_, lane)| lane.committed(number))).await?;
    Ok(())
}

/// The peer is gone: it says nothing while it writes.
async fn broken(stream: &TcpStream) -> io::Error {
    match stream.peek(&mut [0]).await {
        Ok(0) => io::ErrorKind::UnexpectedEof.into(),
        Ok(_) => io::Error::new(io::ErrorKind::InvalidData, "the peer speaks in mid-batch"),
        Err(error) => error,
    }
}

/// A batch whose slots the peer's device can write.
#[derive(Debug)]
struct Exposed {
    /// `None` after its end.
    batch: Option<Batch>,
    targets: Vec<Target>,
    regions: Vec<Registered>,
}

impl Exposed {
    /// Opens the slots of a batch, dealt over lanes with these domains. Blocks: memory is pinned.
    #[allow(unsafe_code, reason = "a device writes the memory")]
    fn new(mut batch: Batch, domains: &[Arc<ProtectionDomain>], page_bytes: usize) -> io::Result<Self> {
        let mut targets = vec![Target::NONE; batch.entries.len()];
        let mut slots: Vec<(u64, usize)> = Vec::new();
        for (at, entry) in batch.entries.iter().enumerate() {
            if let Some(slot) = batch.opened.slot(entry.place) {
                slots.push((slot.as_mut_ptr().expose_provenance() as u64, at));
            }
        }
        // Adjacent slots have one registration.
        slots.sort_unstable();
        let mut open = Self {
            batch: Some(batch),
            targets: Vec::new(),
            regions: Vec::new(),
        };
        let deals = slots.chunks(slots.len().div_ceil(domains.len()).max(1));
        for (lane, (deal, domain)) in deals.zip(domains).enumerate() {
            for run in deal.chunk_by(|a, b| a.0 + page_bytes as u64 == b.0) {
                let access = AccessFlags::LocalWrite | AccessFlags::RemoteWrite;
                // SAFETY: the run's slots are `batch.opened`'s, which keeps their pool. It is touched again only after `close`,
                // and given back only if that worked.
                let region = unsafe { Registered::new(domain, run[0].0, run.len() * page_bytes, access)? };
                for (at, entry) in run {
                    targets[*entry] = Target {
                        lane: lane as u32,
                        rkey: region.rkey(),
                        at: *at,
                    };
                }
                open.regions.push(region);
            }
        }
        open.targets = targets;
        Ok(open)
    }

    /// Takes the slots away from the device, and gives their batch: before that nobody may look at them.
    fn close(&mut self) -> io::Result<Option<Batch>> {
        let batch = self.batch.take();
        for region in &mut self.regions {
            if let Err(error) = region.close() {
                // It may write them still: nobody may have them again.
                std::mem::forget(batch);
                tracing::error!(%error, "an RDMA device does not let slots go: they are lost until this process ends");
                return Err(error);
            }
        }
        Ok(batch)
    }

    /// Closes, and says of each page how it arrived. Blocks: digests are computed.
    fn judge(mut self) -> io::Result<Vec<PageState>> {
        let Some(mut batch) = self.close()? else {
            return Ok(Vec::new());
        };
        let entries = std::mem::take(&mut batch.entries);
        let page = |entry: Entry| match batch.opened.slot(entry.place) {
            Some(slot) => {
                let sum = digest(slot);
                batch.opened.judge(&entry, sum)
            }
            None => batch.opened.absent(entry.place),
        };
        Ok(entries.into_iter().map(page).collect())
    }
}

impl Drop for Exposed {
    fn drop(&mut self) {
        let _ = self.close();
    }
}

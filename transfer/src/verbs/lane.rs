//! A lane: one queue pair between two devices, with its own completion queue, waited for by descriptor.

use super::device::{Device, why};
use super::ffi::{self, Channel};
use super::wire::End;
use sideway::ibverbs::AccessFlags;
use sideway::ibverbs::address::{AddressHandleAttribute, Gid};
use sideway::ibverbs::completion::{
    BasicCompletionQueue, GenericCompletionQueue, PollCompletionQueueError, WorkCompletionOperationType as Operation,
    WorkCompletionStatus as Status,
};
use sideway::ibverbs::device_context::Mtu;
use sideway::ibverbs::protection_domain::ProtectionDomain;
use sideway::ibverbs::queue_pair::{
    BasicQueuePair, PostSendGuard as _, QueuePair as _, QueuePairAttribute, QueuePairState, SetScatterGatherEntry as _,
    WorkRequestFlags,
};
use std::collections::VecDeque;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io;
use std::sync::Arc;
use tokio::io::unix::AsyncFd;

/// Writes under way at once: with pieces of [`super::PIECE_BYTES`], far more than any link has in flight, and below what every device offers.
pub(super) const SEND_QUEUE: u32 = 128;
/// Every so many writes the device says that they are done: rarely enough to cost nothing, often enough to keep the queue full.
const SIGNAL_EVERY: usize = 16;
/// Commits that may arrive before they are looked at. A peer sends one for each batch, and waits for its answer.
const RECEIVES: u32 = 2;
/// A packet without acknowledgement is sent again after 4.096 µs · 2^16 = 0.27 s: longer than a busy peer or a switch's reroute takes.
const ACK_TIMEOUT: u8 = 16;
/// Times it is sent again: so many that lost packets end no transfer. A dead link shows after about two seconds. Not 7, the most there is:
/// soft-RoCE takes that for ever.
const RETRIES: u8 = 6;
/// Times a peer may say that it has no receive posted. It always has, so a few are plenty; 7 would mean for ever.
const NOT_READY_RETRIES: u8 = 3;
/// How long it asks to wait then: 0.64 ms.
const NOT_READY_TIMER: u8 = 12;
/// Routers between the nodes.
const HOPS_MAX: u8 = 64;
/// A packet's number has 24 bits.
const PSN_MASK: u32 = 0xff_ffff;

/// Bytes to write into the peer's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) from: u64,
    pub(super) bytes: u32,
    pub(super) to: u64,
    pub(super) rkey: u32,
}

/// One end of a lane. The queue pair is first, so that it is destroyed first.
#[derive(Debug)]
pub(super) struct Lane {
    queue_pair: BasicQueuePair,
    events: AsyncFd<Channel>,
    completions: Arc<BasicCompletionQueue>,
    /// Polled and not looked at yet.
    arrived: VecDeque<Completion>,
    psn: u32,
    /// Writes posted, and of these the ones that are known to be done.
    posted: u64,
    done: u64,
}

#[derive(Debug)]
struct Completion {
    id: u64,
    status: u32,
    operation: u32,
    /// Of a commit.
    number: u32,
}

fn failed(error: &dyn std::error::Error) -> io::Error {
    io::Error::other(why(error))
}

/// What a device says of a work request that failed, in its words.
fn check(status: u32) -> io::Result<()> {
    match status {
        0 => Ok(()),
        known if known <= Status::TagMatchingRendezvousIncomplete as u32 => {
            Err(io::Error::other(format!("RDMA: {:?}", Status::from(known))))
        }
        other => Err(io::Error::other(format!("RDMA: status {other}"))),
    }
}

impl Lane {
    /// A queue pair that is not connected. `access` is what the peer may do over it. Blocks for a moment.
    pub(super) fn new(device: &Device, domain: &Arc<ProtectionDomain>, access: AccessFlags) -> io::Result<Self> {
        let channel = device.context.create_comp_channel().map_err(|e| failed(&e))?;
        let completions = device
            .context
            .create_cq_builder()
            .setup_cqe(SEND_QUEUE + RECEIVES)
            .setup_comp_channel(&channel, 0)
            .build()
            .map_err(|e| failed(&e))?;
        let queue = GenericCompletionQueue::from(completions.clone());
        let mut queue_pair = domain
            .create_qp_builder()
            .setup_max_send_wr(SEND_QUEUE)
            .setup_max_recv_wr(RECEIVES)
            .setup_send_cq(queue.clone())
            .setup_recv_cq(queue)
            .build()
            .map_err(|e| failed(&e))?;
        let mut init = QueuePairAttribute::new();
        init.setup_state(QueuePairState::Init)
            .setup_pkey_index(0)
            .setup_port(device.port)
            .setup_access_flags(access);
        queue_pair.modify(&init).map_err(|e| failed(&e))?;
        Ok(Self {
            queue_pair,
            events: Channel::watched(channel)?,
            completions,
            arrived: VecDeque::new(),
            // Random, so that a packet of an older queue pair with this number is not taken for one of this.
            psn: RandomState::new().build_hasher().finish() as u32 & PSN_MASK,
            posted: 0,
            done: 0,
        })
    }

    /// What the peer must know.
    pub(super) fn end(&self, device: &Device) -> End {
        End {
            queue_pair: self.queue_pair.qp_number(),
            psn: self.psn,
            lid: device.lid,
            mtu: device.mtu as u8,
            gid: device.gid,
        }
    }

    /// Connects it to the other end, to receive. Blocks for a moment.
    pub(super) fn connect(&mut self, device: &Device, to: &End) -> io::Result<()> {
        let mtu = u32::from(to.mtu).min(device.mtu as u32);
        if !(Mtu::Mtu256 as u32..=Mtu::Mtu4096 as u32).contains(&mtu) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the peer's packets have no size",
            ));
        }
        let mut address = AddressHandleAttribute::new();
        address
            .setup_port(device.port)
            .setup_dest_lid(to.lid)
            .setup_grh_src_gid_index(device.gid_index)
            .setup_grh_dest_gid(&Gid { raw: to.gid })
            .setup_grh_hop_limit(HOPS_MAX);
        let mut ready = QueuePairAttribute::new();
        ready
            .setup_state(QueuePairState::ReadyToReceive)
            .setup_path_mtu(Mtu::from(mtu))
            .setup_dest_qp_num(to.queue_pair)
            .setup_rq_psn(to.psn & PSN_MASK)
            .setup_max_dest_read_atomic(0)
            .setup_min_rnr_timer(NOT_READY_TIMER)
            .setup_address_vector(&address);
        self.queue_pair.modify(&ready).map_err(|e| failed(&e))
    }

    /// After [`Self::connect`]: makes it send, too. Blocks for a moment.
    pub(super) fn ready_to_send(&mut self) -> io::Result<()> {
        let mut ready = QueuePairAttribute::new();
        ready
            .setup_state(QueuePairState::ReadyToSend)
            .setup_sq_psn(self.psn)
            .setup_timeout(ACK_TIMEOUT)
            .setup_retry_cnt(RETRIES)
            .setup_rnr_retry(NOT_READY_RETRIES)
            .setup_max_read_atomic(0);
        self.queue_pair.modify(&ready).map_err(|e| failed(&e))
    }

    /// Makes room for the commits of peers: nothing is received into it but their number.
    pub(super) fn post_receives(&mut self) -> io::Result<()> {
        (0..RECEIVES).try_for_each(|_| self.post_receive())
    }

    fn post_receive(&mut self) -> io::Result<()> {
        let mut guard = self.queue_pair.start_post_recv();
        guard.construct_wr(0);
        guard.post().map_err(|e| failed(&e))
    }

    /// Writes pieces of local memory registered as `lkey` into the peer's, and after them the commit of batch `number`. When it returns, all are there.
    ///
    /// # Safety
    /// The local memory is not changed or freed before this returns; or, if it is dropped, before the lane has ended.
    #[allow(unsafe_code, reason = "a device reads the memory")]
    pub(super) async unsafe fn write(&mut self, pieces: &[Piece], lkey: u32, number: u32) -> io::Result<()> {
        for pieces in pieces.chunks(SIGNAL_EVERY) {
            self.room_for(pieces.len() as u64).await?;
            // SAFETY: the caller's promise.
            unsafe { self.post_writes(pieces, lkey)? };
        }
        self.room_for(1).await?;
        self.post_commit(number)?;
        self.room_for(u64::from(SEND_QUEUE)).await
    }

    /// Posts writes at once; the last tells when they are done.
    ///
    /// # Safety
    /// As for [`Self::write`].
    #[allow(unsafe_code, reason = "a device reads the memory")]
    unsafe fn post_writes(&mut self, pieces: &[Piece], lkey: u32) -> io::Result<()> {
        let mut guard = self.queue_pair.start_post_send();
        for (at, piece) in pieces.iter().enumerate() {
            self.posted += 1;
            let flags = if at + 1 == pieces.len() {
                WorkRequestFlags::Signaled
            } else {
                WorkRequestFlags::none()
            };
            let request = guard.construct_wr(self.posted, flags).setup_write(piece.rkey, piece.to);
            // SAFETY: the caller's promise.
            unsafe { request.setup_sge(lkey, piece.from, piece.bytes) };
        }
        guard.post().map_err(|e| failed(&e))
    }

    fn post_commit(&mut self, number: u32) -> io::Result<()> {
        self.posted += 1;
        let mut guard = self.queue_pair.start_post_send();
        guard
            .construct_wr(self.posted, WorkRequestFlags::Signaled)
            .setup_write_imm(0, 0, number.to_be());
        guard.post().map_err(|e| failed(&e))
    }

    /// Waits until so many writes more fit into the queue.
    async fn room_for(&mut self, writes: u64) -> io::Result<()> {
        while self.posted - self.done + writes > u64::from(SEND_QUEUE) {
            // They are done in their order, so one that is done tells of all before it.
            self.done = self.next().await?.id;
        }
        Ok(())
    }

    /// Waits for the peer's commit of batch `number`: all that it wrote before over this lane is there then.
    pub(super) async fn committed(&mut self, number: u32) -> io::Result<()> {
        let completion = self.next().await?;
        let commit = Operation::ReceiveWithImmediate as u32;
        if (completion.operation, completion.number) != (commit, number) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the peer commits what it was not asked for",
            ));
        }
        self.post_receive()
    }

    /// The next completion.
    async fn next(&mut self) -> io::Result<Completion> {
        loop {
            if let Some(completion) = self.poll()? {
                return Ok(completion);
            }
            ffi::notify(&self.completions)?;
            // It may have come before that.
            if let Some(completion) = self.poll()? {
                return Ok(completion);
            }
            let mut ready = self.events.readable().await?;
            match ready.try_io(|channel| ffi::take_completion_event(channel.get_ref(), &self.completions)) {
                Ok(taken) => taken?,
                Err(_would_block) => {}
            }
        }
    }

    fn poll(&mut self) -> io::Result<Option<Completion>> {
        if self.arrived.is_empty() {
            match self.completions.start_poll() {
                Ok(found) => self.arrived.extend(found.map(|c| Completion {
                    id: c.wr_id(),
                    status: c.status(),
                    operation: c.opcode(),
                    number: u32::from_be(c.imm_data()),
                })),
                Err(PollCompletionQueueError::CompletionQueueEmpty) => {}
                Err(error) => return Err(failed(&error)),
            }
        }
        let first = self.arrived.pop_front();
        first.map(|c| check(c.status).map(|()| c)).transpose()
    }
}

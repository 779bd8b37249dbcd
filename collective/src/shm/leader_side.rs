//! How a leader passes the sums of its host to the ring between hosts, and the totals back to its
//! host.

use std::ops::Range;

use rustix::event::{PollFd, PollFlags};

use super::all_reduce::{SLOTS, add};
use super::host_region::HostRegion;
use super::link_monitor::LinkMonitor;
use super::region::CounterSlot::{Reduced, Sent, TotalPublished, TotalTaken};
use super::region::{Scope, WaitContext};
use crate::algorithm::chunk::{chunk, segment, segment_count};
use crate::algorithm::payload::Payload;
use crate::algorithm::schedule::{Content, Piece, RankInfo, Span};
use crate::transfer::{HostStage, LocalFault};

/// The leader's side of its host's memory in one operation. Sums and totals pass through it in the
/// order that all ranks of the host expect.
pub(super) struct LeaderSide<'a> {
    host_region: &'a HostRegion,
    context: WaitContext<'a>,
    link_monitor: LinkMonitor<'a>,
    /// Chunk of this host, whose sums are sent before anything is received.
    own: Range<usize>,
    segment_len: usize,
    /// Number of its segments that are reduced.
    own_summed: usize,
    hosts: usize,
    /// Number of blocks of all operations whose sums are taken.
    sent: u64,
    /// Number of blocks of all operations whose totals are published.
    published: u64,
}

impl<'a> LeaderSide<'a> {
    pub(super) fn new(
        host_region: &'a HostRegion,
        context: WaitContext<'a>,
        host: RankInfo,
        span: Span,
    ) -> Self {
        let own = chunk(span.len, host.world, host.rank);
        let (sent, published) = (host_region.blocks, host_region.blocks);
        let Span { segment_len, .. } = span;
        Self {
            host_region,
            context,
            link_monitor: LinkMonitor::new([context.host, None], |_| true, context.sequence),
            own,
            segment_len,
            own_summed: 0,
            hosts: host.world,
            sent,
            published,
        }
    }

    /// Writes this host's sum of the first `segments` segments of its own chunk to the output, as
    /// far as that is not done yet. Nothing is received there before these segments are sent.
    fn sum_own(&mut self, segments: usize, payload: &mut Payload<'_>) -> Result<(), LocalFault> {
        let (src, dst) = payload.sum_bufs();
        let segments = segments.min(segment_count(&self.own, self.segment_len));
        while self.own_summed < segments {
            let range = segment(&self.own, self.segment_len, self.own_summed);
            let sum = &mut dst[range.clone()];
            sum.copy_from_slice(&src[range]);
            self.own_summed += 1;
            self.add(sum)?;
        }
        Ok(())
    }

    /// Adds the followers' sum of the next block.
    fn add(&mut self, sum: &mut [f32]) -> Result<(), LocalFault> {
        let (HostRegion { region, layout, .. }, block) = (self.host_region, self.sent);
        self.host_region.wait(self.context, Scope::Followers, Reduced, block + 1)?;
        add(sum, region.memory.floats(layout.sum(block), sum.len()));
        self.sent += 1;
        region.publish(Sent, self.sent);
        Ok(())
    }

    /// Publishes the next block's total to the followers.
    fn publish_total(&mut self, total: &[f32]) -> Result<(), LocalFault> {
        let (HostRegion { region, layout, .. }, block) = (self.host_region, self.published);
        self.host_region.wait(
            self.context,
            Scope::Followers,
            TotalTaken,
            (block + 1).saturating_sub(SLOTS),
        )?;
        region.memory.write(layout.total(block), bytemuck::cast_slice(total));
        self.published += 1;
        region.publish(TotalPublished, self.published);
        Ok(())
    }
}

impl HostStage for LeaderSide<'_> {
    fn before_send(&mut self, piece: &Piece, payload: &mut Payload<'_>) -> Result<(), LocalFault> {
        match piece.content {
            Content::Own => self.sum_own(piece.segment + 1, payload),
            Content::Sum | Content::Total => Ok(()),
        }
    }

    fn after_receive(
        &mut self,
        piece: &Piece,
        payload: &mut Payload<'_>,
    ) -> Result<(), LocalFault> {
        // The ranks of the host write the blocks in schedule order: the host's own chunk comes
        // first.
        self.sum_own(usize::MAX, payload)?;
        let is_sum = piece.content == Content::Sum;
        if is_sum {
            self.add(&mut payload.sum_bufs().1[piece.range.clone()])?;
        }
        // The sum received in the last step of the reduce-scatter is now the total.
        let is_completed = is_sum && piece.step + 2 == self.hosts;
        if is_completed {
            payload.round_total(piece);
        }
        if is_completed || piece.content == Content::Total {
            self.publish_total(&payload.sum_bufs().1[piece.range.clone()])?;
        }
        Ok(())
    }

    fn watch<'s>(&'s self, fds: &mut Vec<PollFd<'s>>) {
        fds.push(PollFd::new(self.host_region.region.notifier(), PollFlags::IN));
        fds.extend(self.link_monitor.fds());
    }

    fn check(&mut self) -> Result<(), LocalFault> {
        let region = &self.host_region.region;
        region.notifier().clear();
        region.failed().or_else(|| self.link_monitor.check()).map_or(Ok(()), Err)
    }
}

//! Links between hosts, as kernels see them: packets arrive in order and delayed, until the link
//! ends or is lost.
//!
//! ```text
//!   ends[0] ── to ends[1]: in flight ─▶ arrived (the receiver's kernel) ──▶ taken by a thread
//!           ◀─ to ends[0]                                                        ends[1]
//! ```
//!
//! * Packets that a process sent before its death still arrive, and then the link's end, unless the
//!   crash loses what is in flight.
//! * Between hosts that are cut off from each other nothing arrives, and neither side is notified.
//!   Packets that were sent meanwhile, the end included, arrive after the cut heals, as kernels
//!   retransmit.
//! * A link that is lost ends on both sides, and what was in flight is lost.
//! * A stopped process takes no packets; its kernel keeps receiving.

use std::collections::VecDeque;

use super::packet::Packet;
use crate::simulation::clock::Micros;

/// A machine: 0 is the master's, `n + 1` is process `n`'s.
pub(crate) type Host = usize;

pub(crate) type LinkId = usize;

pub(crate) const MASTER: Host = 0;

#[derive(Debug)]
pub(crate) struct Link {
    /// The dialling host and the dialled host.
    pub(crate) ends: [Host; 2],
    pub(crate) is_control: bool,
    /// Whether both ends use the link: it is no longer a dial in progress.
    pub(crate) is_established: bool,
    pub(crate) is_lost: bool,
    /// To `ends[0]`, and to `ends[1]`.
    pub(crate) directions: [Direction; 2],
}

#[derive(Debug, Default)]
pub(crate) struct Direction {
    pub(crate) in_flight: VecDeque<Packet>,
    pub(crate) arrived: VecDeque<Packet>,
    pub(crate) last: Micros,
    /// Whether the sender has closed this direction.
    pub(crate) shut: bool,
    /// Number of arrivals that were due while the hosts were cut off from each other.
    pub(crate) stalled: u32,
}

/// All links of the run, and the state of the network.
#[derive(Debug)]
pub(crate) struct Network {
    pub(crate) links: Vec<Link>,
    pub(crate) cuts: Vec<(Host, Host)>,
    /// Latency factors of slow hosts.
    pub(crate) slow: Vec<(Host, u64)>,
    /// Mean one-way latency.
    pub(crate) latency: Micros,
}

impl Network {
    pub(crate) fn new(latency: Micros) -> Self {
        Self { links: Vec::new(), cuts: Vec::new(), slow: Vec::new(), latency }
    }

    pub(crate) fn open(&mut self, from: Host, to: Host, is_control: bool) -> LinkId {
        let directions = Default::default();
        self.links.push(Link {
            ends: [from, to],
            is_control,
            is_established: is_control,
            is_lost: false,
            directions,
        });
        self.links.len() - 1
    }

    pub(crate) fn link(&self, link: LinkId) -> &Link {
        &self.links[link]
    }

    /// Takes the next packet that has arrived for `host`.
    pub(crate) fn take(&mut self, link: LinkId, host: Host) -> Option<Packet> {
        let side = self.links[link].side(host);
        self.links[link].directions[side].arrived.pop_front()
    }

    /// Whether the next packet that `host` would take is the link's end.
    pub(crate) fn has_ended(&self, link: LinkId, host: Host) -> bool {
        let link = &self.links[link];
        matches!(link.directions[link.side(host)].arrived.front(), Some(Packet::End))
    }

    pub(crate) fn mark_established(&mut self, link: LinkId) {
        self.links[link].is_established = true;
    }

    /// Whether `host` knows that the link is lost: sending fails.
    pub(crate) fn is_reset(&self, link: LinkId, host: Host) -> bool {
        self.links[link].is_lost && self.has_ended(link, host)
    }

    pub(crate) fn is_cut(&self, a: Host, b: Host) -> bool {
        self.cuts.iter().any(|&cut| cut == (a, b) || cut == (b, a))
    }

    pub(crate) fn cut(&mut self, a: Host, b: Host) {
        self.cuts.push((a, b));
    }

    pub(crate) fn slow_down(&mut self, host: Host, factor: u64) {
        self.slow.push((host, factor));
    }

    pub(crate) fn speed_up(&mut self, host: Host) {
        self.slow.retain(|&(h, _)| h != host);
    }

    /// Links of `host` that it has not closed.
    pub(crate) fn links_of(&self, host: Host) -> Vec<LinkId> {
        let open = |l: &Link| l.ends.contains(&host) && !l.directions[1 - l.side(host)].shut;
        (0..self.links.len()).filter(|&id| open(&self.links[id])).collect()
    }

    pub(crate) fn factor(&self, link: LinkId) -> u64 {
        let ends = self.links[link].ends;
        self.slow
            .iter()
            .filter(|(host, _)| ends.contains(host))
            .map(|&(_, factor)| factor)
            .max()
            .unwrap_or(1)
    }
}

impl Link {
    pub(crate) fn side(&self, host: Host) -> usize {
        usize::from(self.ends[1] == host)
    }

    pub(crate) fn peer(&self, host: Host) -> Host {
        self.ends[1 - self.side(host)]
    }
}

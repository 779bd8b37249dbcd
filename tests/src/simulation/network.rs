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

use super::state::event::Event;
use super::state::network::{Host, LinkId};
use super::state::packet::Packet;
use super::world::World;

impl World {
    /// Sends a packet from `host`; it is dropped silently if `host` has closed the link.
    pub(super) fn send(&mut self, link: LinkId, host: Host, packet: Packet) {
        let mean = self.net.latency * self.net.factor(link);
        let late = if self.rng.chance(1, 50) { 10 } else { 1 };
        let latency = (mean / 2 + self.rng.below(mean)) * late;
        let now = self.clock.now();
        let l = &mut self.net.links[link];
        let to = 1 - l.side(host);
        let direction = &mut l.directions[to];
        if direction.shut {
            return;
        }
        direction.shut = matches!(packet, Packet::End);
        direction.last = direction.last.max(now + latency);
        direction.in_flight.push_back(packet);
        let waiting = direction.in_flight.len() + direction.arrived.len();
        self.clock.at(direction.last, Event::Arrive { link, to });
        if waiting > QUEUE_MAX {
            self.violate(format!("{waiting} packets are queued on one link"));
        }
    }

    /// Closes the link on the side of `host`: the peer sees the end after everything that was sent.
    pub(super) fn shut(&mut self, link: LinkId, host: Host) {
        self.send(link, host, Packet::End);
    }

    /// Drops everything that `host` has sent and that has not arrived yet.
    pub(super) fn lose_in_flight(&mut self, link: LinkId, host: Host) {
        let l = &mut self.net.links[link];
        let to = 1 - l.side(host);
        l.directions[to].in_flight.clear();
    }

    /// Breaks the link: both sides see its end, and nothing else.
    pub(super) fn lose(&mut self, link: LinkId) {
        self.net.links[link].is_lost = true;
        for host in self.net.links[link].ends {
            self.lose_in_flight(link, host);
            // An orderly end that was in flight is lost as well.
            let to = 1 - self.net.links[link].side(host);
            self.net.links[link].directions[to].shut = false;
            self.shut(link, host);
        }
    }

    pub(super) fn heal(&mut self, a: Host, b: Host) {
        self.net.cuts.retain(|&cut| cut != (a, b) && cut != (b, a));
        for link in 0..self.net.links.len() {
            if self.net.links[link].ends != [a, b] && self.net.links[link].ends != [b, a] {
                continue;
            }
            for to in 0..2 {
                let stalled = std::mem::take(&mut self.net.links[link].directions[to].stalled);
                if stalled > 0 {
                    // The kernel retransmits after a while, and then everything arrives at once.
                    let again = self.clock.now() + self.rng.below(200_000);
                    self.net.links[link].directions[to].last = again;
                    (0..stalled).for_each(|_| self.clock.at(again, Event::Arrive { link, to }));
                }
            }
        }
    }

    pub(super) fn on_arrive(&mut self, link: LinkId, to: usize) {
        let [a, b] = self.net.links[link].ends;
        let is_cut = self.net.is_cut(a, b);
        let direction = &mut self.net.links[link].directions[to];
        if is_cut {
            direction.stalled += 1;
            return;
        }
        let Some(packet) = direction.in_flight.pop_front() else { return };
        let host = self.net.links[link].ends[to];
        if matches!(packet, Packet::Dial) {
            return self.on_dialled(link, host);
        }
        let introduces = matches!(packet, Packet::Introduction { .. });
        self.net.links[link].directions[to].arrived.push_back(packet);
        match host.checked_sub(1) {
            None => self.on_master_input(link),
            Some(p) if self.net.links[link].is_control => self.wake_control(p),
            Some(p) if introduces => {
                let delay = self.thread_delay();
                self.clock.after(delay, Event::Acceptor { p, link });
            }
            Some(p) => self.wake_trainer_for(p, link),
        }
    }

    /// The kernel of the dialled host answers, whatever its process is doing.
    fn on_dialled(&mut self, link: LinkId, host: Host) {
        let listens = host.checked_sub(1).is_some_and(|p| self.processes[p].endpoint.open);
        self.send(link, host, if listens { Packet::Accepted } else { Packet::End });
    }
}

/// Limit of the queue of one link; a job this small never comes close to it.
const QUEUE_MAX: usize = 4000;

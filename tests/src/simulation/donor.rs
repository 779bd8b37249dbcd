//! The donor's end of a transfer to a joiner, which runs next to the ring, modelled after
//! `elasticdl`'s `donor`: a delivery per joiner, in a thread of its own.

use std::collections::VecDeque;
use std::rc::Rc;

use elasticdl::session::Session;
use elasticdl::session::header::StepHeader;
use elasticdl_proto::{Generation, WorkerId};

use super::clock::Micros;
use super::state::donor::{Delivery, Donor, Request};
use super::state::event::Event;
use super::state::network::LinkId;
use super::state::packet::{Packet, StateMessage};
use super::trace::trace;
use super::world::World;

impl World {
    /// A joiner requests the state, or the rest of it. A request replaces an earlier one of the
    /// same joiner, whose link is closed.
    pub(super) fn on_state_request(&mut self, p: usize, request: Request) {
        let now = self.clock.now();
        let Donor { waiting, deliveries } = &mut self.processes[p].trainer.donor;
        let of_joiner = |other: &Request| other.member == request.member;
        let mut former: Vec<LinkId> =
            waiting.iter().filter(|r| of_joiner(r)).map(|r| r.link).collect();
        waiting.retain(|other| !of_joiner(other));
        // A delivery waits so long for its joiner to dial again.
        let is_late = |d: &Delivery| d.link.is_none() && now > d.broke_at + RETURN_WINDOW_US;
        deliveries.retain(|delivery| !is_late(delivery));
        let current = deliveries.iter().position(|d| d.is_fed && d.member == request.member);
        match current {
            None => waiting.push_back(request),
            Some(i) => {
                former.extend(deliveries[i].link);
                if deliveries[i].resume(request.link, request.position) {
                    self.oracle.coverage.fetches_resumed += 1;
                    self.wake_delivery(p, request.link);
                } else {
                    deliveries.remove(i);
                    former.push(request.link);
                }
            }
        }
        former.into_iter().for_each(|link| self.shut(link, p + 1));
    }

    /// A worker that makes no more steps serves no joiners.
    pub(super) fn end_service_if_over(&mut self, p: usize) {
        if self.processes[p].trainer.session.as_ref().is_some_and(Session::is_finished) {
            self.end_transfers(p);
        }
    }

    /// Starts to serve pending state requests. All ranks of the group have reported that they hold
    /// this step.
    pub(super) fn serve_state_requests(&mut self, p: usize) {
        let trainer = &mut self.processes[p].trainer;
        let Some(session) = &trainer.session else { return };
        let Some((generation, state)) = session.confirmed() else { return };
        let record = state.record();
        if !trainer.donor.waiting.is_empty() {
            self.check_served_step(p, generation, record.step);
        }
        while let Some(request) = self.processes[p].trainer.donor.waiting.pop_front() {
            let Request { member, link, .. } = request;
            let model = &self.processes[p].trainer.model;
            let delivery = Delivery {
                member,
                link: Some(link),
                broke_at: 0,
                generation,
                record: record.clone(),
                lineage: model.lineage,
                len: model.parameters.len(),
                snapshot: Some(model.parameters.clone()),
                has_begun: false,
                sent: 0,
                results: VecDeque::new(),
                sent_results: 0,
                first_step: record.step,
                caught_up_sent: false,
                is_fed: true,
                woken: false,
            };
            let (name, step) = (self.name(p), record.step);
            trace!(self, "{name}: serves worker {member} the state of step {step}");
            self.processes[p].trainer.donor.deliveries.push(delivery);
            self.wake_delivery(p, link);
        }
    }

    /// Sends the result of the last step, which was committed in `generation`, to the joiners.
    pub(super) fn send_result(&mut self, p: usize, generation: Generation, headers: &[StepHeader]) {
        let trainer = &mut self.processes[p].trainer;
        let step = trainer.state().map_or(0, |state| state.step.saturating_sub(1));
        let sum = &trainer.model.last_sum;
        for delivery in trainer.donor.deliveries.iter_mut().filter(|delivery| delivery.is_fed) {
            let (headers, sum) = (headers.to_vec(), sum.clone());
            delivery.results.push_back(StateMessage::Result { generation, step, headers, sum });
            // The group does not wait for a joiner that is too slow: the joiner has to start again.
            delivery.is_fed = delivery.results.len() - delivery.sent_results <= AHEAD_MAX;
        }
        self.wake_deliveries(p);
    }

    /// This worker enters `generation`. Joiners that are members of it are complete; the others
    /// keep following.
    pub(super) fn switch_fetchers(
        &mut self,
        p: usize,
        generation: Generation,
        members: &[WorkerId],
    ) {
        let Donor { waiting, deliveries } = &mut self.processes[p].trainer.donor;
        let enters = |member: &WorkerId| members.contains(member);
        let former: Vec<LinkId> =
            waiting.iter().filter(|r| enters(&r.member)).map(|r| r.link).collect();
        waiting.retain(|request| !enters(&request.member));
        for delivery in deliveries.iter_mut().filter(|d| d.is_fed && enters(&d.member)) {
            delivery.results.push_back(StateMessage::End { generation });
            delivery.is_fed = false;
        }
        former.into_iter().for_each(|link| self.shut(link, p + 1));
        self.wake_deliveries(p);
    }

    /// Ends all transfers: this worker makes no more steps.
    pub(super) fn end_transfers(&mut self, p: usize) {
        let donor = &mut self.processes[p].trainer.donor;
        let former: Vec<LinkId> = donor.waiting.drain(..).map(|request| request.link).collect();
        donor.deliveries.iter_mut().for_each(|delivery| delivery.is_fed = false);
        former.into_iter().for_each(|link| self.shut(link, p + 1));
        self.wake_deliveries(p);
    }

    /// Wakes the deliveries that have a link; others end if the trainer does not feed them.
    fn wake_deliveries(&mut self, p: usize) {
        let deliveries = &mut self.processes[p].trainer.donor.deliveries;
        deliveries.retain(|delivery| delivery.is_fed || delivery.link.is_some());
        let links: Vec<LinkId> = deliveries.iter().filter_map(|delivery| delivery.link).collect();
        links.into_iter().for_each(|link| self.wake_delivery(p, link));
    }

    /// The joiner at the other end of `link` is sent something, or has sent something.
    pub(super) fn wake_delivery(&mut self, p: usize, link: LinkId) {
        let Some(delivery) = self.processes[p].trainer.donor.delivery(link) else { return };
        if !std::mem::replace(&mut delivery.woken, true) {
            let delay = self.rng.between(5, SEND_US_MAX);
            self.clock.after(delay, Event::Delivery { p, link });
        }
    }

    /// The thread of a delivery reads what the joiner has sent, and sends the next message.
    pub(super) fn on_delivery(&mut self, p: usize, link: LinkId) {
        let now = self.clock.now();
        while let Some(packet) = self.net.take(link, p + 1) {
            let donor = &mut self.processes[p].trainer.donor;
            let Some(delivery) = donor.delivery(link) else { return };
            if let Packet::Position(position) = packet {
                delivery.forget_applied(position);
                continue;
            }
            (delivery.link, delivery.broke_at) = (None, now);
            donor.deliveries.retain(|delivery| delivery.is_fed || delivery.link.is_some());
            return self.shut(link, p + 1);
        }
        let donor = &mut self.processes[p].trainer.donor;
        let Some(delivery) = donor.delivery(link) else { return };
        delivery.woken = false;
        match delivery.next_message() {
            Some(message) => {
                self.send(link, p + 1, Packet::StateMessage(Rc::new(message)));
                self.wake_delivery(p, link);
            }
            None if !delivery.is_fed => {
                donor.deliveries.retain(|delivery| delivery.link != Some(link));
                self.shut(link, p + 1);
            }
            None => {}
        }
    }
}

/// Number of results that may wait for a joiner.
const AHEAD_MAX: usize = 64;
/// How long a delivery waits for its joiner to dial again.
const RETURN_WINDOW_US: Micros = 10_000_000;
/// Maximum time from one message to a joiner to the next.
const SEND_US_MAX: Micros = 400;

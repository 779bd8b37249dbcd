//! How a joiner gets the state: both ends of the transfer that runs next to the ring, modelled
//! after `elasticdl`'s `donor` and `elasticdl_collective`'s `state`.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::rc::Rc;

use elasticdl::core::header::{StateRecord, StepHeader};
use elasticdl::core::session::Session;
use elasticdl_proto::{Generation, WorkerId};

use super::clock::Micros;
use super::network::{LinkId, Packet};
use super::process::process_at;
use super::trace::trace;
use super::trainer::Doing;
use super::world::{Event, World};

/// The joiners that a process serves, and those whose requests are pending.
#[derive(Debug, Default)]
pub(super) struct Donor {
    pending: VecDeque<(WorkerId, LinkId)>,
    fetchers: Vec<(WorkerId, LinkId)>,
}

/// The donor that a joiner fetches the state from.
#[derive(Debug)]
pub(super) struct Source {
    donor: WorkerId,
    host: usize,
    pub(super) link: LinkId,
    introduced: bool,
    /// Time of the last packet from the donor; before the first packet, the time of the dial.
    last_received: Micros,
    has_sent_state: bool,
}

/// A message to a joiner. Steps are those of the donor's group of `generation`.
#[derive(Debug)]
pub(super) enum StateMessage {
    /// The donor enters this generation together with the joiner.
    End {
        generation: Generation,
    },
    Result {
        generation: Generation,
        headers: Vec<StepHeader>,
        sum: Vec<u8>,
    },
    /// The state, with the oracle's lineage.
    State {
        generation: Generation,
        record: StateRecord,
        parameters: Vec<u8>,
        lineage: u64,
    },
    /// There is nothing more to send for now.
    CaughtUp,
}

impl Donor {
    pub(super) fn is_serving(&self) -> bool {
        !self.fetchers.is_empty()
    }
}

impl World {
    // ---- the donor ----

    /// A joiner requests the state. A request replaces an earlier one of the same joiner, whose
    /// link is closed.
    pub(super) fn on_state_request(&mut self, p: usize, member: WorkerId, link: LinkId) {
        let pending = &mut self.processes[p].trainer.donor.pending;
        let former: Vec<LinkId> = pending.iter().filter(|v| v.0 == member).map(|v| v.1).collect();
        pending.retain(|v| v.0 != member);
        pending.push_back((member, link));
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
        let (Some(generation), Some(state)) = (session.in_round(), session.state()) else { return };
        let record = state.record();
        if !trainer.donor.pending.is_empty() {
            self.check_served_step(p, generation, record.step);
        }
        while let Some((member, link)) = self.processes[p].trainer.donor.pending.pop_front() {
            let trainer = &mut self.processes[p].trainer;
            let fetchers = &mut trainer.donor.fetchers;
            let former: Vec<LinkId> =
                fetchers.iter().filter(|f| f.0 == member).map(|f| f.1).collect();
            fetchers.retain(|f| f.0 != member);
            fetchers.push((member, link));
            let (parameters, lineage) = (trainer.model.parameters.clone(), trainer.model.lineage);
            let message =
                StateMessage::State { generation, record: record.clone(), parameters, lineage };
            former.into_iter().for_each(|link| self.shut(link, p + 1));
            trace!(
                self,
                "{}: serves worker {member} the state of step {}",
                self.name(p),
                record.step
            );
            self.send_state_message(p, link, message);
        }
    }

    /// Sends the result of a step, which was committed in `generation`, to the joiners.
    pub(super) fn send_result(&mut self, p: usize, generation: Generation, headers: &[StepHeader]) {
        let trainer = &self.processes[p].trainer;
        for (_, link) in trainer.donor.fetchers.clone() {
            let sum = self.processes[p].trainer.model.last_sum.clone();
            self.send_state_message(
                p,
                link,
                StateMessage::Result { generation, headers: headers.to_vec(), sum },
            );
        }
        // The group does not wait for a joiner that is too slow: the joiner has to start again.
        let slow = |net: &super::network::Network, link| net.waiting(link, p + 1) > AHEAD_MAX;
        let Self { processes, net, .. } = self;
        let fetchers = &mut processes[p].trainer.donor.fetchers;
        let too_slow: Vec<LinkId> =
            fetchers.iter().map(|f| f.1).filter(|&link| slow(net, link)).collect();
        fetchers.retain(|f| !too_slow.contains(&f.1));
        too_slow.into_iter().for_each(|link| self.shut(link, p + 1));
    }

    /// This worker enters `generation`. Joiners that are members of it are complete; the others
    /// keep following.
    pub(super) fn switch_fetchers(
        &mut self,
        p: usize,
        generation: Generation,
        members: &[WorkerId],
    ) {
        let fetchers = &mut self.processes[p].trainer.donor.fetchers;
        let (done, rest) = fetchers.drain(..).partition(|f| members.contains(&f.0));
        *fetchers = rest;
        let done: Vec<(WorkerId, LinkId)> = done;
        for (_, link) in done {
            self.send_state_message(p, link, StateMessage::End { generation });
            self.shut(link, p + 1);
        }
    }

    /// Ends all transfers: this worker makes no more steps.
    pub(super) fn end_transfers(&mut self, p: usize) {
        for (_, link) in std::mem::take(&mut self.processes[p].trainer.donor.fetchers) {
            self.shut(link, p + 1);
        }
    }

    fn send_state_message(&mut self, p: usize, link: LinkId, message: StateMessage) {
        self.send(link, p + 1, Packet::StateMessage(Rc::new(message)));
        self.send(link, p + 1, Packet::StateMessage(Rc::new(StateMessage::CaughtUp)));
    }

    // ---- the joiner ----

    /// Takes the next message from `donor`; dials `donor` first if there is no link to it.
    pub(super) fn fetch(&mut self, p: usize, donor: WorkerId, address: SocketAddr) {
        let source = self.processes[p].trainer.source.as_ref();
        if source.is_none_or(|source| source.donor != donor) {
            self.drop_source(p);
            let (host, last_received) = (process_at(address) + 1, self.clock.now());
            let link = self.net.open(p + 1, host, false);
            let source = Source {
                donor,
                host,
                link,
                introduced: false,
                last_received,
                has_sent_state: false,
            };
            self.processes[p].trainer.source = Some(source);
            self.send(link, p + 1, Packet::Dial);
        }
        self.continue_fetch(p);
    }

    /// A packet has arrived, or one is overdue.
    pub(super) fn continue_fetch(&mut self, p: usize) {
        let now = self.clock.now();
        let Some(source) = &mut self.processes[p].trainer.source else {
            return self.turn_later(p);
        };
        let link = source.link;
        let packet = self.net.take(link, p + 1);
        if packet.is_some() {
            source.last_received = now;
        }
        match packet {
            Some(Packet::Accepted) => {
                source.introduced = true;
                let Some(from) = self.processes[p].worker else { return };
                self.send(link, p + 1, Packet::Introduction { generation: None, from });
                self.turn_later(p);
            }
            Some(Packet::StateMessage(message)) => {
                source.has_sent_state = true;
                self.apply_state_message(p, &message);
            }
            Some(_) => self.fetch_broke(p, "the donor ended the link"),
            None => self.wait_for_source(p),
        }
    }

    fn wait_for_source(&mut self, p: usize) {
        let now = self.clock.now();
        let Some(source) = &mut self.processes[p].trainer.source else { return };
        let silence_max = if source.introduced { SILENCE_MAX_US } else { DIAL_LIMIT_US };
        let donor = source.host - 1;
        // A live donor sends keep-alives; before its first message it may be within a long step.
        let is_responsive = !self.net.is_cut(source.host, p + 1) && !self.processes[donor].paused;
        let Some(source) = &mut self.processes[p].trainer.source else { return };
        if source.has_sent_state && is_responsive {
            source.last_received = now;
        }
        if (source.has_sent_state || !source.introduced) && now > source.last_received + silence_max
        {
            return self.fetch_broke(p, "the donor is silent");
        }
        let introduced = source.introduced;
        self.processes[p].trainer.doing = Doing::Fetching;
        if introduced && !self.processes[p].inbox.is_empty() {
            return self.wake_trainer(p);
        }
        let ticket = self.processes[p].trainer.ticket();
        self.clock.after(silence_max / 2 + 1, Event::Trainer { p, ticket });
    }

    fn apply_state_message(&mut self, p: usize, message: &StateMessage) {
        let trainer = &mut self.processes[p].trainer;
        let Some(session) = &mut trainer.session else { return };
        match message {
            StateMessage::End { generation } => session.fetch_ended(*generation),
            StateMessage::CaughtUp => session.caught_up(),
            StateMessage::State { generation, record, parameters, lineage } => {
                trainer.model.parameters.clone_from(parameters);
                trainer.model.lineage = *lineage;
                if !session.install(record.clone(), None) {
                    return self
                        .violate(format!("{}: a fetched state is inconsistent", self.name(p)));
                }
                session.fetched(*generation);
                self.oracle.coverage.fetched += 1;
            }
            StateMessage::Result { generation, headers, sum } => {
                let step = session.state().map(|state| state.step);
                if step.is_none() || headers.iter().any(|header| Some(header.step) != step) {
                    return self.fetch_broke(p, "the donor sent the result of another step");
                }
                trainer.model.reduced.clone_from(sum);
                self.update(p, headers.clone());
                if let Some(session) = &mut self.processes[p].trainer.session {
                    session.fetched(*generation);
                }
                self.oracle.coverage.followed += 1;
            }
        }
        self.turn_later(p);
    }

    fn fetch_broke(&mut self, p: usize, why: &str) {
        trace!(self, "{}: the fetch failed, {why}", self.name(p));
        self.drop_source(p);
        if let Some(session) = &mut self.processes[p].trainer.session {
            session.fetch_broke();
        }
        // A message of the master that arrives meanwhile may be needed for the next attempt.
        self.processes[p].trainer.doing = Doing::Resting;
        if !self.processes[p].inbox.is_empty() {
            return self.wake_trainer(p);
        }
        let ticket = self.processes[p].trainer.ticket();
        self.clock.after(FETCH_PAUSE_US, Event::Trainer { p, ticket });
    }

    pub(super) fn drop_source(&mut self, p: usize) {
        if let Some(source) = self.processes[p].trainer.source.take() {
            self.shut(source.link, p + 1);
        }
    }

    /// Whether `p` fetches the state, or has just fetched it.
    pub(super) fn is_joining(&self, p: usize) -> bool {
        let trainer = &self.processes[p].trainer;
        trainer.source.is_some() && trainer.session.as_ref().and_then(Session::group_rank).is_none()
    }
}

/// Number of results that may wait for a joiner.
const AHEAD_MAX: usize = 64;
const FETCH_PAUSE_US: Micros = 50_000;
/// How long a joiner tolerates silence of a donor that has begun to send, whatever the worker
/// timeout is.
const SILENCE_MAX_US: Micros = 30_000_000;
const DIAL_LIMIT_US: Micros = 2_000_000;

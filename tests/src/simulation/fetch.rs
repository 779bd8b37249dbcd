//! How a newcomer comes by the state: both ends of the transfer beside the ring, after
//! `elasticdl_worker`'s `donor` and `elasticdl_collective`'s `state`.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::rc::Rc;

use elasticdl_proto::{Generation, WorkerId};
use elasticdl_worker::core::header::{StateRecord, StepHeader};
use elasticdl_worker::core::session::Session;

use super::clock::Micros;
use super::network::{LinkId, Packet};
use super::process::process_at;
use super::story::tell;
use super::trainer::Doing;
use super::world::{Event, World};

/// The newcomers that a process serves, and those at its door.
#[derive(Debug, Default)]
pub(super) struct Donor {
    lobby: VecDeque<(WorkerId, LinkId)>,
    fetchers: Vec<(WorkerId, LinkId)>,
}

/// Where a newcomer gets the state from.
#[derive(Debug)]
pub(super) struct Source {
    donor: WorkerId,
    host: usize,
    pub(super) link: LinkId,
    introduced: bool,
    /// When the donor was heard last; before its first word, when it was dialled.
    heard: Micros,
    speaks: bool,
}

/// What newcomers are sent. Steps are those of the donor's group of `generation`.
#[derive(Debug)]
pub(super) enum Parcel {
    /// The donor goes into this generation, and the newcomer with it.
    End {
        generation: Generation,
    },
    Result {
        generation: Generation,
        headers: Vec<StepHeader>,
        sum: Vec<u8>,
    },
    /// With the oracles' era beside it.
    State {
        generation: Generation,
        record: StateRecord,
        parameters: Vec<u8>,
        era: u64,
    },
    /// There is no more for now.
    Tip,
}

impl Donor {
    pub(super) fn is_giving(&self) -> bool {
        !self.fetchers.is_empty()
    }
}

impl World {
    // ---- the donor ----

    /// A newcomer is at the door; one that comes again has given up its former link.
    pub(super) fn on_visitor(&mut self, p: usize, member: WorkerId, link: LinkId) {
        let lobby = &mut self.processes[p].trainer.donor.lobby;
        let former: Vec<LinkId> = lobby.iter().filter(|v| v.0 == member).map(|v| v.1).collect();
        lobby.retain(|v| v.0 != member);
        lobby.push_back((member, link));
        former.into_iter().for_each(|link| self.shut(link, p + 1));
    }

    /// A worker that makes no more steps serves nobody.
    pub(super) fn receive_visitors(&mut self, p: usize) {
        if self.processes[p].trainer.session.as_ref().is_some_and(Session::is_over) {
            self.dismiss(p);
        }
    }

    /// Begins to serve newcomers that have come to the door. Every rank of the group has said that
    /// it holds this step.
    pub(super) fn serve_visitors(&mut self, p: usize) {
        let trainer = &mut self.processes[p].trainer;
        let Some(session) = &trainer.session else { return };
        let (Some(generation), Some(state)) = (session.in_round(), session.state()) else { return };
        let record = state.record();
        if !trainer.donor.lobby.is_empty() {
            self.check_given(p, generation, record.step);
        }
        while let Some((member, link)) = self.processes[p].trainer.donor.lobby.pop_front() {
            let trainer = &mut self.processes[p].trainer;
            let fetchers = &mut trainer.donor.fetchers;
            let former: Vec<LinkId> =
                fetchers.iter().filter(|f| f.0 == member).map(|f| f.1).collect();
            fetchers.retain(|f| f.0 != member);
            fetchers.push((member, link));
            let (parameters, era) = (trainer.model.parameters.clone(), trainer.model.era);
            let parcel = Parcel::State { generation, record: record.clone(), parameters, era };
            former.into_iter().for_each(|link| self.shut(link, p + 1));
            tell!(
                self,
                "{}: gives worker {member} the state of step {}",
                self.name(p),
                record.step
            );
            self.give(p, link, parcel);
        }
    }

    /// A step was committed in `generation`.
    pub(super) fn give_result(&mut self, p: usize, generation: Generation, headers: &[StepHeader]) {
        let trainer = &self.processes[p].trainer;
        for (_, link) in trainer.donor.fetchers.clone() {
            let sum = self.processes[p].trainer.model.kept.clone();
            self.give(p, link, Parcel::Result { generation, headers: headers.to_vec(), sum });
        }
        // Nobody waits for a newcomer that is too slow: it has to begin again.
        let slow = |net: &super::network::Network, link| net.waiting(link, p + 1) > AHEAD_MAX;
        let Self { processes, net, .. } = self;
        let fetchers = &mut processes[p].trainer.donor.fetchers;
        let too_slow: Vec<LinkId> =
            fetchers.iter().map(|f| f.1).filter(|&link| slow(net, link)).collect();
        fetchers.retain(|f| !too_slow.contains(&f.1));
        too_slow.into_iter().for_each(|link| self.shut(link, p + 1));
    }

    /// This worker goes into `generation`. Newcomers that are in it too have got everything; the
    /// others follow it.
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
            self.give(p, link, Parcel::End { generation });
            self.shut(link, p + 1);
        }
    }

    /// This worker makes no more steps.
    pub(super) fn dismiss(&mut self, p: usize) {
        for (_, link) in std::mem::take(&mut self.processes[p].trainer.donor.fetchers) {
            self.shut(link, p + 1);
        }
    }

    fn give(&mut self, p: usize, link: LinkId, parcel: Parcel) {
        self.send(link, p + 1, Packet::Parcel(Rc::new(parcel)));
        self.send(link, p + 1, Packet::Parcel(Rc::new(Parcel::Tip)));
    }

    // ---- the newcomer ----

    /// Takes the next parcel from `donor`, which is dialled if there is no link to it.
    pub(super) fn fetch(&mut self, p: usize, donor: WorkerId, address: SocketAddr) {
        let source = self.processes[p].trainer.source.as_ref();
        if source.is_none_or(|source| source.donor != donor) {
            self.leave_source(p);
            let (host, heard) = (process_at(address) + 1, self.clock.now());
            let link = self.net.open(p + 1, host, false);
            let source = Source { donor, host, link, introduced: false, heard, speaks: false };
            self.processes[p].trainer.source = Some(source);
            self.send(link, p + 1, Packet::Dial);
        }
        self.go_on_fetching(p);
    }

    /// Something has come, or should have.
    pub(super) fn go_on_fetching(&mut self, p: usize) {
        let now = self.clock.now();
        let Some(source) = &mut self.processes[p].trainer.source else {
            return self.turn_later(p);
        };
        let link = source.link;
        let packet = self.net.take(link, p + 1);
        if packet.is_some() {
            source.heard = now;
        }
        match packet {
            Some(Packet::Accepted) => {
                source.introduced = true;
                let Some(from) = self.processes[p].worker else { return };
                self.send(link, p + 1, Packet::Introduction { generation: None, from });
                self.turn_later(p);
            }
            Some(Packet::Parcel(parcel)) => {
                source.speaks = true;
                self.unpack(p, &parcel);
            }
            Some(_) => self.fetch_broke(p, "the donor ended the link"),
            None => self.wait_for_source(p),
        }
    }

    fn wait_for_source(&mut self, p: usize) {
        let now = self.clock.now();
        let Some(source) = &mut self.processes[p].trainer.source else { return };
        let patience = if source.introduced { PATIENCE_US } else { DIAL_LIMIT_US };
        let donor = source.host - 1;
        // A donor that lives beats; before its first parcel it may be within a long step.
        let beats = !self.net.is_cut(source.host, p + 1) && !self.processes[donor].paused;
        let Some(source) = &mut self.processes[p].trainer.source else { return };
        if source.speaks && beats {
            source.heard = now;
        }
        if (source.speaks || !source.introduced) && now > source.heard + patience {
            return self.fetch_broke(p, "the donor is silent");
        }
        let introduced = source.introduced;
        self.processes[p].trainer.doing = Doing::Fetching;
        if introduced && !self.processes[p].inbox.is_empty() {
            return self.wake_trainer(p);
        }
        let ticket = self.processes[p].trainer.ticket();
        self.clock.after(patience / 2 + 1, Event::Trainer { p, ticket });
    }

    fn unpack(&mut self, p: usize, parcel: &Parcel) {
        let trainer = &mut self.processes[p].trainer;
        let Some(session) = &mut trainer.session else { return };
        match parcel {
            Parcel::End { generation } => session.fetch_ended(*generation),
            Parcel::Tip => session.caught_up(),
            Parcel::State { generation, record, parameters, era } => {
                trainer.model.parameters.clone_from(parameters);
                trainer.model.era = *era;
                if !session.install(record.clone(), None) {
                    return self
                        .violate(format!("{}: a fetched state makes no sense", self.name(p)));
                }
                session.fetched(*generation);
                self.books.tally.fetched += 1;
            }
            Parcel::Result { generation, headers, sum } => {
                let step = session.state().map(|state| state.step);
                if step.is_none() || headers.iter().any(|header| Some(header.step) != step) {
                    return self.fetch_broke(p, "it sent another step's result");
                }
                trainer.model.reduced.clone_from(sum);
                self.update(p, headers.clone());
                if let Some(session) = &mut self.processes[p].trainer.session {
                    session.fetched(*generation);
                }
                self.books.tally.followed += 1;
            }
        }
        self.turn_later(p);
    }

    fn fetch_broke(&mut self, p: usize, why: &str) {
        tell!(self, "{}: gets no state, {why}", self.name(p));
        self.leave_source(p);
        if let Some(session) = &mut self.processes[p].trainer.session {
            session.fetch_broke();
        }
        // What the master says meanwhile may be what the next attempt needs.
        self.processes[p].trainer.doing = Doing::Resting;
        if !self.processes[p].inbox.is_empty() {
            return self.wake_trainer(p);
        }
        let ticket = self.processes[p].trainer.ticket();
        self.clock.after(FETCH_PAUSE_US, Event::Trainer { p, ticket });
    }

    pub(super) fn leave_source(&mut self, p: usize) {
        if let Some(source) = self.processes[p].trainer.source.take() {
            self.shut(source.link, p + 1);
        }
    }

    /// Whether `p` fetches the state, or has just fetched it.
    pub(super) fn is_newcomer(&self, p: usize) -> bool {
        let trainer = &self.processes[p].trainer;
        trainer.source.is_some() && trainer.session.as_ref().and_then(Session::place).is_none()
    }
}

/// Results that may wait for a newcomer.
const AHEAD_MAX: usize = 64;
const FETCH_PAUSE_US: Micros = 50_000;
/// Of a newcomer with a donor that has begun, whatever the master tolerates.
const PATIENCE_US: Micros = 30_000_000;
const DIAL_LIMIT_US: Micros = 2_000_000;

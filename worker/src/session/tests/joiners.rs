//! Joining workers and the members that send them the state, in the simulated world.

use super::*;

/// Messages from a donor to a joining worker.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    donor: WorkerId,
    /// Whether the donor has sent its state, and now sends its commits.
    served: bool,
    messages: VecDeque<StateMessage>,
    broken: bool,
}

#[derive(Clone, Debug)]
pub(super) enum StateMessage {
    End(Generation),
    Result(Generation, Vec<StepHeader>, Absorbed),
    State(Generation, StateRecord, Absorbed),
    CaughtUp,
}

impl World {
    /// Sends the state to waiting joiners once all ranks have reported that they hold this step. At
    /// random, a joiner is too slow or a link breaks.
    pub(super) fn serve(&mut self, index: usize) {
        let node = &self.nodes[index];
        let Some((generation, state)) = node.session.confirmed() else { return };
        for stream in self.streams.values_mut().filter(|s| s.donor == node.id && !s.broken) {
            if !stream.served {
                stream.served = true;
                stream.messages.push_back(StateMessage::State(
                    generation,
                    state.record(),
                    node.parameters.clone(),
                ));
                stream.messages.push_back(StateMessage::CaughtUp);
            } else if self.rng.random_ratio(1, 500) {
                stream.broken = true;
            }
        }
    }

    /// A served joiner receives every step that its donor commits.
    pub(super) fn forward_result(
        &mut self,
        index: usize,
        generation: Generation,
        headers: &[StepHeader],
        sum: &Absorbed,
    ) {
        let id = self.nodes[index].id;
        for stream in self.streams.values_mut().filter(|s| s.donor == id && s.served && !s.broken) {
            stream.messages.push_back(StateMessage::Result(
                generation,
                headers.to_vec(),
                sum.clone(),
            ));
            stream.messages.push_back(StateMessage::CaughtUp);
        }
    }

    pub(super) fn end_streams(&mut self, index: usize, membership: &Membership) {
        let id = self.nodes[index].id;
        for (joiner, stream) in self.streams.iter_mut().filter(|(_, s)| s.donor == id && s.served) {
            if membership.rank_of(*joiner).is_some() && !stream.broken {
                stream.messages.push_back(StateMessage::End(membership.generation));
                stream.broken = true;
            }
        }
        self.streams.remove(&id);
    }

    /// `id` has crashed. Some of its messages may still arrive.
    pub(super) fn break_streams(&mut self, id: WorkerId) {
        for stream in self.streams.values_mut().filter(|s| s.donor == id) {
            stream.broken = true;
            let arrives = self.rng.random_range(0..=stream.messages.len());
            stream.messages.truncate(arrives);
        }
    }

    pub(super) fn fetch(&mut self, index: usize, donor: WorkerId) {
        let id = self.nodes[index].id;
        if self.streams.get(&id).is_none_or(|stream| stream.donor != donor) {
            let alive = self.nodes.iter().any(|n| n.id == donor);
            let stream = Stream { donor, served: false, messages: VecDeque::new(), broken: !alive };
            self.streams.insert(id, stream);
        }
        let node = &mut self.nodes[index];
        let stream = self.streams.get_mut(&id).expect("it was just put there");
        match stream.messages.pop_front() {
            Some(StateMessage::State(generation, record, parameters)) => {
                node.parameters = parameters;
                assert!(node.session.install(record, None), "seed {}", self.seed);
                node.session.fetched(generation);
            }
            Some(StateMessage::Result(generation, headers, sum)) => {
                node.reduced = sum;
                assert!(node.session.result_fetched(generation, headers, true), "{}", self.seed);
            }
            Some(StateMessage::End(generation)) => node.session.fetch_ended(generation),
            None if stream.broken => {
                self.streams.remove(&id);
                node.session.fetch_broke();
            }
            Some(StateMessage::CaughtUp) => node.session.caught_up(),
            None => {}
        }
    }
}

//! Newcomers and the members that give them the state, in the imagined world.

use super::*;

/// What a donor has sent to a joiner.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    donor: WorkerId,
    /// The donor has begun; it sends what it commits.
    served: bool,
    parcels: VecDeque<Parcel>,
    broken: bool,
}

#[derive(Clone, Debug)]
pub(super) enum Parcel {
    End(Generation),
    Result(Generation, Vec<StepHeader>, Absorbed),
    State(Generation, StateRecord, Absorbed),
    Tip,
}

impl World {
    /// Sends the state to newcomers that wait for it, when all ranks have said that they hold this
    /// step. Now and then one is too slow, or a link breaks.
    pub(super) fn serve(&mut self, index: usize) {
        let node = &self.nodes[index];
        let (Some(generation), Some(state)) = (node.session.in_round(), node.session.state())
        else {
            return;
        };
        for stream in self.streams.values_mut().filter(|s| s.donor == node.id && !s.broken) {
            if !stream.served {
                stream.served = true;
                stream.parcels.push_back(Parcel::State(
                    generation,
                    state.record(),
                    node.parameters.clone(),
                ));
                stream.parcels.push_back(Parcel::Tip);
            } else if self.rng.random_ratio(1, 500) {
                stream.broken = true;
            }
        }
    }

    /// Who is served gets every step that its donor commits.
    pub(super) fn pass_on(
        &mut self,
        index: usize,
        generation: Generation,
        headers: &[StepHeader],
        sum: &Absorbed,
    ) {
        let id = self.nodes[index].id;
        for stream in self.streams.values_mut().filter(|s| s.donor == id && s.served && !s.broken) {
            stream.parcels.push_back(Parcel::Result(generation, headers.to_vec(), sum.clone()));
            stream.parcels.push_back(Parcel::Tip);
        }
    }

    pub(super) fn end_streams(&mut self, index: usize, membership: &Membership) {
        let id = self.nodes[index].id;
        for (joiner, stream) in self.streams.iter_mut().filter(|(_, s)| s.donor == id && s.served) {
            if membership.rank_of(*joiner).is_some() && !stream.broken {
                stream.parcels.push_back(Parcel::End(membership.generation));
                stream.broken = true;
            }
        }
        self.streams.remove(&id);
    }

    /// `id` is gone: of what it has sent some may still arrive.
    pub(super) fn break_streams(&mut self, id: WorkerId) {
        for stream in self.streams.values_mut().filter(|s| s.donor == id) {
            stream.broken = true;
            let arrives = self.rng.random_range(0..=stream.parcels.len());
            stream.parcels.truncate(arrives);
        }
    }

    pub(super) fn fetch(&mut self, index: usize, donor: WorkerId) {
        let id = self.nodes[index].id;
        if self.streams.get(&id).is_none_or(|stream| stream.donor != donor) {
            let alive = self.nodes.iter().any(|n| n.id == donor);
            let stream = Stream { donor, served: false, parcels: VecDeque::new(), broken: !alive };
            self.streams.insert(id, stream);
        }
        let node = &mut self.nodes[index];
        let stream = self.streams.get_mut(&id).expect("it was just put there");
        match stream.parcels.pop_front() {
            Some(Parcel::State(generation, record, parameters)) => {
                node.parameters = parameters;
                assert!(node.session.install(record, None), "seed {}", self.seed);
                node.session.fetched(generation);
            }
            Some(Parcel::Result(generation, headers, sum)) => {
                node.parameters.extend(&sum);
                node.kept = sum;
                node.session.commit(headers, Duration::ZERO);
                node.session.fetched(generation);
            }
            Some(Parcel::End(generation)) => node.session.fetch_ended(generation),
            None if stream.broken => {
                self.streams.remove(&id);
                node.session.fetch_broke();
            }
            Some(Parcel::Tip) => node.session.caught_up(),
            None => {}
        }
    }
}

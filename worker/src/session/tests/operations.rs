//! Collective operations of the simulated group.

use super::*;

impl World {
    /// Enters the next operation of the node's ring with the node's contribution.
    pub(super) fn enter(&mut self, index: usize, what: Operation, from: Option<usize>) {
        let node = &mut self.nodes[index];
        let digest = fingerprint(&node.parameters);
        let (bytes, gradient) = match &what {
            Operation::Evaluate(blocks) => {
                // The score of a block depends on the parameters.
                let score =
                    |block| BTreeMap::from([("loss".to_owned(), (digest % 1000 + block) as f64)]);
                let blocks_scores = blocks.clone().map(score).collect();
                let scores = Scores {
                    records: VALIDATION,
                    first_block: blocks.start,
                    blocks: blocks_scores,
                    failed: false,
                };
                (encode(&scores), Vec::new())
            }
            Operation::Broadcast(what) => {
                let tensors = match what {
                    Broadcast::Result { .. } => node.kept.clone(),
                    _ => node.parameters.clone(),
                };
                (node.session.broadcast_bytes(*what), tensors)
            }
            Operation::Step => (encode(&node.session.header(digest)), node.gradient.clone()),
            Operation::Synchronize => (encode(&node.session.sync_header(digest)), Vec::new()),
            Operation::ExchangeHeaders => (encode(&node.session.header(digest)), Vec::new()),
        };
        let (generation, rank) = node.session.group_rank().expect("operations happen in groups");
        let ring = self.rings.get_mut(&generation.0).expect("a ring per generation");
        if ring.operations.len() <= node.operation {
            ring.operations.push(vec![None; ring.world_size]);
        }
        ring.operations[node.operation][rank] = Some(Entry { bytes, gradient: Rc::new(gradient) });
        node.doing = Doing::Operation { what, from };
    }

    /// Completes the node's operation if possible. If the ring is broken, the operation may break.
    pub(super) fn complete(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        let (generation, _) = node.session.group_rank().expect("operations happen in groups");
        let Doing::Operation { what, from } = &node.doing else { return };
        let ring = &self.rings[&generation.0];
        let entries = &ring.operations[node.operation];
        let complete = match from {
            Some(from) => entries[*from].is_some(),
            None => entries.iter().all(Option::is_some),
        };
        if !complete || (ring.broken && self.rng.random_bool(0.5)) {
            if ring.broken {
                node.doing = Doing::Nothing;
                node.session.broken(None, "reset by peer".into());
            }
            return;
        }
        let (what, from) = (what.clone(), *from);
        let entries: Vec<Option<Entry>> = entries.clone();
        node.operation += 1;
        node.doing = Doing::Nothing;
        self.finish_operation(index, &what, from.and_then(|from| entries[from].clone()), &entries);
    }

    pub(super) fn finish_operation(
        &mut self,
        index: usize,
        what: &Operation,
        donor: Option<Entry>,
        all: &[Option<Entry>],
    ) {
        let seed = self.seed;
        let node = &mut self.nodes[index];
        let headers = || -> Vec<StepHeader> {
            all.iter()
                .map(|e| decode(&e.as_ref().expect("complete").bytes).expect("a header"))
                .collect()
        };
        match what {
            Operation::Evaluate(_) => {
                let scores = all.iter().map(|e| decode(&e.as_ref().expect("complete").bytes));
                let scores: Vec<Scores> = scores.map(|s| s.expect("scores")).collect();
                node.session.evaluated(&scores);
            }
            Operation::Broadcast(what) => {
                let donor = donor.expect("a donor");
                if what.is_of_tensors() {
                    match what {
                        Broadcast::Result { is_kept: true } => node.kept = donor.gradient.to_vec(),
                        Broadcast::Result { is_kept: false } => {
                            node.reduced = donor.gradient.to_vec();
                        }
                        _ => node.parameters = donor.gradient.to_vec(),
                    }
                    node.session.tensors_broadcast(true)
                } else {
                    node.session.bytes_broadcast(&donor.bytes)
                }
                .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            }
            Operation::Step => {
                node.reduced = all
                    .iter()
                    .flat_map(|e| e.as_ref().expect("complete").gradient.iter().copied())
                    .collect();
                let headers = headers();
                let listed: Absorbed = headers.iter().flat_map(|h| h.ranges.clone()).collect();
                assert_eq!(
                    node.reduced, listed,
                    "seed {seed}: headers list the gradients' records"
                );
                if listed.is_empty() {
                    assert!(self.storage_fails, "seed {seed}: a step of no records");
                }
                let outcome = node.session.summed(headers, true);
                self.settle(index, outcome);
            }
            Operation::Synchronize => {
                let headers: Vec<SyncHeader> = all
                    .iter()
                    .map(|e| decode(&e.as_ref().expect("complete").bytes).expect("a header"))
                    .collect();
                let outcome = node.session.synced(&headers).map_err(|mismatch| match mismatch {
                    GroupMismatch::State(mismatch) => mismatch,
                    GroupMismatch::Device(_) | GroupMismatch::Program(_) => {
                        panic!("seed {seed}: {mismatch:?}")
                    }
                });
                self.settle(index, outcome);
            }
            Operation::ExchangeHeaders => {
                let headers = headers();
                let outcome = node.session.headers_exchanged(&headers);
                self.settle(index, outcome);
            }
        }
    }

    /// Does what a rank does when replicas differ.
    fn settle(&mut self, index: usize, outcome: Result<(), StateMismatch>) {
        let Err(mismatch) = outcome else { return };
        assert!(self.flipped > 0, "seed {}: {mismatch:?}", self.seed);
        // Scores of a state that was wrong.
        self.evaluations.clear();
        if !mismatch.is_failing() {
            return self.nodes[index].session.broken(None, mismatch.to_string());
        }
        let is_distrusted = !mismatch.verdict.has_majority;
        let has_state = |node: &Node| node.session.state().is_some();
        let failing = self.nodes[index].id;
        let mut lost = vec![failing];
        lost.extend(self.nodes.iter().filter(|n| is_distrusted && has_state(n)).map(|n| n.id));
        for id in lost {
            if let Some(index) = self.nodes.iter().position(|node| node.id == id) {
                self.crash(index);
                self.joins += 1;
            }
        }
    }

    /// A bit of this node's parameters flips: an empty range changes their fingerprint alone.
    pub(super) fn flip(&mut self, index: usize) {
        self.flipped += 1;
        let flipped = u64::from(self.flipped);
        let bit = RecordRange { epoch: u32::MAX, start: flipped, end: flipped };
        self.nodes[index].parameters.push(bit);
    }
}

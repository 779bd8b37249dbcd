use std::net::{IpAddr, Ipv4Addr};
use std::time::Instant;

use elasticdl_collective::{
    Endpoint, EndpointOptions, Member, Position, Secret, StateMessageHeader, StateReceiver,
};
use elasticdl_proto::RecordRange;

use super::*;
use crate::machine::System;

/// Far beyond the duration of any test; only a hang reaches it.
const WATCHDOG: Duration = Duration::from_secs(60);

const LEN: usize = 1000;

/// Generation of the group that sends the state of step 2.
const GENERATION: Generation = Generation(3);

fn donor(idle_timeout: Duration) -> Donor {
    Donor::new(idle_timeout, PART_FLOATS_MAX, Arc::new(System))
}

fn record() -> StateRecord {
    let ranges = vec![RecordRange { epoch: 0, start: 0, end: 8 }];
    StateRecord {
        step: 2,
        records_trained: 8,
        epochs_complete: 0,
        ranges,
        repeated: 0,
        evaluation: Default::default(),
        steps_skipped: 0,
        row_touches: 0,
        created: 0,
    }
}

fn note() -> StateNote {
    StateNote { program: Program::default(), record: record(), from: 0 }
}

fn ends() -> [Endpoint; 2] {
    [1, 2].map(end)
}

fn end(id: u64) -> Endpoint {
    let options = EndpointOptions::new("job", id, Secret::new("open sesame"));
    Endpoint::bind(IpAddr::V4(Ipv4Addr::LOCALHOST), options).expect("loopback has free ports")
}

/// Worker 2 requests the state from the donor, worker 1.
fn visit(donor: &mut Donor, ends: &[Endpoint; 2], position: Option<Position>) -> StateReceiver {
    let member = Member { id: 1, address: ends[0].address() };
    ends[0].joiners().name([2, 3]);
    let source = ends[1].fetch(member, WATCHDOG, WATCHDOG, position).expect("the donor listens");
    let until = Instant::now() + WATCHDOG;
    loop {
        assert!(Instant::now() < until, "the request never arrives");
        if let Some(request) = ends[0].next_state_request() {
            donor.admit(Box::new(request));
            return source;
        }
        std::thread::yield_now();
    }
}

/// Sends a state of ones and twos, as between two steps, after the headers of all ranks.
fn give(donor: &mut Donor, len: usize) {
    prepare(donor, (GENERATION, 2), [Arc::new(vec![1.0; len]), Arc::new(vec![2.0; len])]);
    donor.release(GENERATION, 2, note);
}

/// Copies a state as soon as there is memory for it.
fn prepare(donor: &mut Donor, (generation, step): (Generation, u64), of: [Arc<Vec<f32>>; 2]) {
    let size = ModelSize { parameters: of[0].len(), slots: of[1].len() };
    let until = Instant::now() + WATCHDOG;
    while !donor.wants_snapshot(generation, step, size) {
        assert!(Instant::now() < until, "the memory is never allocated");
        std::thread::yield_now();
    }
    let copying = |memory: [Vec<f32>; 2]| {
        let mut from = of.into_iter();
        Ok::<_, ()>(memory.map(|to| Copying::Later { from: from.next().unwrap(), to }))
    };
    donor.prepare(generation, step, copying).unwrap();
}

/// A donor that serves worker 2.
fn serving(donor: &mut Donor, len: usize) -> (StateReceiver, [Endpoint; 2]) {
    let ends = ends();
    let source = visit(donor, &ends, None);
    give(donor, len);
    (source, ends)
}

fn next(source: &mut StateReceiver) -> (StateMessageHeader, Vec<f32>) {
    let head = source.next(WATCHDOG).unwrap().expect("there is more");
    let mut floats = vec![0.0; head.floats as usize];
    source.take(&mut floats).unwrap();
    (head, floats)
}

/// Position and floats of a part.
fn next_part(source: &mut StateReceiver) -> (u64, Vec<f32>) {
    let (head, floats) = next(source);
    let note: PartNote = header::decode(&head.note).unwrap();
    assert_eq!((head.kind, note.digest), (KIND_PART, digest(&floats)));
    (note.from, floats)
}

fn state_note(source: &mut StateReceiver) -> StateNote {
    let (head, _) = next(source);
    assert_eq!((head.kind, head.generation), (KIND_STATE, GENERATION.0));
    header::decode(&head.note).unwrap()
}

#[test]
fn a_joiner_receives_the_state_each_result_and_the_end_when_it_becomes_a_member() {
    let mut donor = donor(WATCHDOG);
    let (mut source, _ends) = serving(&mut donor, LEN);
    assert_eq!(state_note(&mut source), note());
    assert_eq!(next_part(&mut source), (0, vec![1.0; LEN]));
    assert_eq!(next_part(&mut source), (LEN as u64, vec![2.0; LEN]));
    assert_eq!(next(&mut source).0.kind, KIND_CAUGHT_UP);
    donor.committed(GENERATION, 2, &[], &Arc::new(vec![5.0; LEN]));
    let (head, floats) = next(&mut source);
    assert_eq!((head.kind, head.generation, floats), (KIND_RESULT, 3, vec![5.0; LEN]));
    assert_eq!(next(&mut source).0.kind, KIND_CAUGHT_UP);
    // A membership without the joiner changes nothing for it.
    donor.switch(Generation(4), |id| id == 1);
    donor.committed(Generation(4), 3, &[], &Arc::new(vec![6.0; LEN]));
    assert_eq!((next(&mut source).0.generation, next(&mut source).0.kind), (4, KIND_CAUGHT_UP));
    donor.switch(Generation(5), |_| true);
    assert_eq!((next(&mut source).0.kind, donor.fetchers.len()), (KIND_END, 0));
}

#[test]
fn a_state_is_sent_only_when_all_ranks_hold_its_step() {
    let mut donor = donor(WATCHDOG);
    let ends = ends();
    let mut source = visit(&mut donor, &ends, None);
    let tensor = || Arc::new(vec![1.0; LEN]);
    let size = ModelSize { parameters: LEN, slots: LEN };
    prepare(&mut donor, (GENERATION, 2), [tensor(), tensor()]);
    assert!(!donor.wants_snapshot(GENERATION, 2, size), "the snapshot exists already");
    // The step failed, and the next group has agreed on the next step.
    donor.switch(Generation(4), |id| id == 1);
    donor.release(GENERATION, 2, note);
    donor.release(Generation(4), 3, note);
    assert!(!donor.is_serving());
    assert_eq!(source.next(Duration::ZERO).unwrap(), None);
    prepare(&mut donor, (Generation(4), 3), [tensor(), tensor()]);
    donor.release(Generation(4), 3, || StateNote {
        record: StateRecord { step: 3, ..record() },
        ..note()
    });
    let (head, _) = next(&mut source);
    let note: StateNote = header::decode(&head.note).unwrap();
    assert_eq!((head.kind, head.generation, note.record.step), (KIND_STATE, 4, 3));
}

#[test]
fn a_joiner_that_is_too_slow_is_dropped_and_its_queue_is_bounded() {
    let mut donor = donor(WATCHDOG);
    // More than the socket buffers hold, so that the thread blocks while it sends the state.
    let (mut source, _ends) = serving(&mut donor, 4 << 20);
    let sum = Arc::new(Vec::new());
    let most = QUEUED_BYTES_MAX / (16 << 20) + 1;
    for step in 0..=most {
        donor.committed(GENERATION, 2 + step as u64, &[], &sum);
    }
    assert_eq!(donor.fetchers.len(), 0);
    assert!(Arc::strong_count(&sum) <= most + 1);
    // Messages that were queued before still arrive. Then the link closes without an end of the
    // stream.
    let mut kinds = Vec::new();
    while let Ok(Some(head)) = source.next(WATCHDOG) {
        let mut floats = vec![0.0; head.floats as usize];
        source.take(&mut floats).unwrap();
        kinds.push(head.kind);
    }
    let begins = [KIND_STATE, KIND_PART, KIND_PART, KIND_RESULT];
    assert!(kinds.starts_with(&begins) && !kinds.contains(&KIND_END), "{kinds:?}");
}

#[test]
fn a_transfer_whose_link_broke_resumes_at_the_joiners_position() {
    let mut donor = donor(WATCHDOG);
    let len = PART_FLOATS_MAX + LEN;
    let (mut source, ends) = serving(&mut donor, len);
    state_note(&mut source);
    assert_eq!(next_part(&mut source).0, 0);
    // The second part was in flight.
    drop(source);
    donor.committed(GENERATION, 2, &[], &Arc::new(vec![5.0; LEN]));
    let at = |floats: usize, step| Some(Position { snapshot: 2, floats: floats as u64, step });
    let mut source = visit(&mut donor, &ends, at(PART_FLOATS_MAX, 2));
    assert_eq!(state_note(&mut source).from, PART_FLOATS_MAX as u64);
    assert_eq!(next_part(&mut source), (PART_FLOATS_MAX as u64, vec![1.0; LEN]));
    assert_eq!(next_part(&mut source).0, len as u64);
    assert_eq!(next_part(&mut source).0, (len + PART_FLOATS_MAX) as u64);
    source.report(at(2 * len, 2).unwrap());
    // A transfer that breaks after the state resumes, too: results that were not applied are sent
    // again.
    assert_eq!(next(&mut source).0.kind, KIND_RESULT);
    drop(source);
    donor.committed(GENERATION, 3, &[], &Arc::new(vec![6.0; LEN]));
    let mut source = visit(&mut donor, &ends, at(2 * len, 2));
    assert_eq!((next(&mut source).1, next(&mut source).1), (vec![5.0; LEN], vec![6.0; LEN]));
    source.report(at(2 * len, 4).unwrap());
    drop(source);
    let mut source = visit(&mut donor, &ends, at(2 * len, 4));
    assert_eq!(next(&mut source).0.kind, KIND_CAUGHT_UP);
    drop(source);
    // A joiner that has lost its parts cannot resume; its transfer starts over.
    let mut source = visit(&mut donor, &ends, None);
    assert!(source.next(WATCHDOG).is_err());
    let mut source = visit(&mut donor, &ends, None);
    give(&mut donor, LEN);
    assert_eq!(state_note(&mut source).from, 0);
}

#[test]
fn the_trainer_gets_its_buffers_back_and_joiners_of_one_step_share_a_snapshot() {
    let mut donor = donor(WATCHDOG);
    let ends = ends();
    let mut source = visit(&mut donor, &ends, None);
    let mut other = visit(&mut donor, &[ends.into_iter().next().unwrap(), end(3)], None);
    let parameters = Arc::new(vec![1.0; LEN]);
    assert!(donor.may_hold(usize::MAX), "one snapshot is always allowed, however large it is");
    prepare(&mut donor, (GENERATION, 2), [Arc::clone(&parameters), Arc::default()]);
    assert!(donor.may_hold(SNAPSHOTS_BYTES / 2) && !donor.may_hold(SNAPSHOTS_BYTES / 2 + 1));
    donor.release(GENERATION, 2, note);
    for source in [&mut source, &mut other] {
        state_note(source);
        assert_eq!(next_part(source).1, [1.0; LEN]);
    }
    assert_eq!((Arc::strong_count(&parameters), donor.held.len(), donor.fetchers.len()), (1, 1, 2));
}

#[test]
fn an_update_waits_for_the_copy_of_the_state_and_writes_to_the_same_memory() {
    let mut donor = donor(WATCHDOG);
    let ends = ends();
    let _source = visit(&mut donor, &ends, None);
    let tensor = || Arc::new(vec![1.0; 4 << 20]);
    let (mut parameters, slots) = (tensor(), tensor());
    prepare(&mut donor, (GENERATION, 2), [Arc::clone(&parameters), slots]);
    donor.end_copy();
    assert!(Arc::get_mut(&mut parameters).is_some());
}

//! A host's memory without a network: leaders pass what they send to each other from hand to hand.
//! Miri runs these, and sees whether ranks ever touch what another one uses.

use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use super::*;
use crate::Fence;
use crate::progress::Progress;
use crate::schedule::Content;
use crate::shared::Memory;

#[test]
fn every_rank_of_every_host_has_the_same_total_and_all_notes() {
    // Chunks of five blocks, more than there are places for.
    let len = 2 * (4 * BLOCK_LEN_MAX + 5) + 1;
    for sizes in [&[3, 1][..], &[2, 4]] {
        let hosts = Hosts::of_sizes(sizes);
        let (senders, mut receivers): (Vec<_>, Vec<_>) =
            sizes.iter().map(|_| mpsc::channel()).unzip();
        receivers.rotate_right(1);
        thread::scope(|scope| {
            let mut ranks = Vec::new();
            for (host, link) in senders.into_iter().zip(receivers).enumerate() {
                let mut link = Some(link);
                for room in rooms(hosts.ranks(host)) {
                    let (rank, link) =
                        (hosts.ranks(host)[ranks.len() - hosts.ranks(host)[0]], link.take());
                    let hierarchy = Hierarchy::new(hosts.clone(), host, room);
                    ranks.push(scope.spawn(move || run(hierarchy, rank, len, link)));
                }
            }
            let world = ranks.len();
            for rank in ranks {
                let (notes, sum) = rank.join().unwrap();
                assert!(
                    notes.iter().enumerate().all(|(rank, note)| *note == [rank as u8; 3]),
                    "{sizes:?}"
                );
                let right = |at: usize| (world * (at % 7) + world * (world - 1) / 2) as f32;
                assert!(sum.iter().enumerate().all(|(at, sum)| *sum == right(at)), "{sizes:?}");
            }
        });
    }
}

/// Two sums of one rank, the second one's notes and total.
fn run(
    mut hierarchy: Hierarchy,
    rank: usize,
    len: usize,
    link: Option<Link>,
) -> (Vec<Vec<u8>>, Vec<f32>) {
    let (pass, progress) = (Fence::new().enter(1).unwrap(), Progress::new());
    let src: Vec<f32> = (0..len).map(|at| (rank + at % 7) as f32).collect();
    let (mut dst, mut notes) = (vec![f32::NAN; len], Notes::TooLong);
    for sequence in 0..2 {
        dst.fill(f32::NAN);
        let (pass, progress) = (&pass, &progress);
        let watch = Watch { host: None, pass, progress, sequence };
        let note = [rank as u8; 3];
        notes = match &link {
            None => hierarchy.follow(watch, &note, &src, &mut dst).unwrap(),
            Some(link) => lead(&mut hierarchy, watch, &note, link, &src, &mut dst),
        };
    }
    let Notes::All(notes) = notes else { panic!("notes are short") };
    (notes, dst)
}

/// As [`Hierarchy::lead`], hand to hand.
fn lead(
    hierarchy: &mut Hierarchy,
    watch: Watch<'_>,
    note: &[u8],
    (next, prev): &Link,
    src: &[f32],
    dst: &mut [f32],
) -> Notes {
    let (seat, extent) = (hierarchy.host, extent(src.len()));
    let (own, front) = hierarchy.open(watch, note, src.len()).unwrap();
    let mut notes = vec![Vec::new(); seat.world];
    notes[seat.rank] = encode(&own);
    let mut payload = Payload::new(Body::Sum { src, dst }, notes).with_front(front);
    let mut schedule = Schedule::all_reduce(seat, extent);
    while !schedule.is_done() {
        if let Some(piece) = schedule.next_send() {
            payload.prepare(&piece).unwrap();
            let (note, body) = payload.outgoing(&piece);
            next.send((note.to_vec(), body.to_vec())).unwrap();
            schedule.on_sent();
            continue;
        }
        let piece = schedule.next_receive().unwrap();
        let (note, body) = prev.recv().unwrap();
        if piece.note {
            payload.expect_note(&piece, note.len());
        }
        let landing = payload.landing(&piece);
        landing.0.copy_from_slice(&note);
        landing.1.copy_from_slice(&body);
        payload.on_landed(&piece).unwrap();
        schedule.on_received();
    }
    let all = payload.into_notes();
    hierarchy.close(&all, src.len()).unwrap()
}

/// One room for all ranks of a host, in one memory; none for a rank alone.
fn rooms(ranks: &[usize]) -> Vec<Option<Room>> {
    let world = ranks.len();
    if world == 1 {
        return vec![None];
    }
    let memories = Memory::of_threads(Hierarchy::bytes(world), world).into_iter().enumerate();
    let room = |(rank, memory)| {
        Room::new(memory, Seat { rank, world }, ranks.to_vec(), Vec::new()).sleepless()
    };
    memories.map(room).map(Some).collect()
}

/// To the next leader, and from the previous one.
type Link = (Sender<Parcel>, Receiver<Parcel>);

/// A note and elements.
type Parcel = (Vec<u8>, Vec<u8>);

#[test]
fn a_host_meets_blocks_as_its_leaders_schedule_does() {
    for hosts in 2..=5 {
        for host in 0..hosts {
            let (seat, extent) =
                (Seat { rank: host, world: hosts }, Extent { len: 103, segment_len: 4 });
            let mut schedule = Schedule::all_reduce(seat, extent);
            let (mut sums, mut totals) = (Vec::new(), Vec::new());
            while let Some(piece) = schedule.next_send().filter(|piece| piece.step == 0) {
                sums.push(piece.range);
                schedule.on_sent();
            }
            while let Some(piece) = schedule.next_receive() {
                if piece.content == Content::Sum {
                    sums.push(piece.range.clone());
                }
                if piece.content == Content::Total || piece.step + 2 == hosts {
                    totals.push(piece.range);
                }
                schedule.on_received();
            }
            assert_eq!(order(seat, host, extent), sums, "host {host} of {hosts}");
            assert_eq!(order(seat, host + 1, extent), totals, "host {host} of {hosts}");
        }
    }
}

#[test]
fn notes_that_make_no_sense_are_no_notes() {
    let all = encode(&Notes::All(vec![b"one".to_vec(), Vec::new()]));
    assert!(
        matches!(notes_of(&all, 2), Ok(Notes::All(notes)) if notes == [b"one".to_vec(), vec![]])
    );
    for cut in 1..all.len() {
        assert!(notes_of(&all[..cut], 2).is_err(), "{cut}");
    }
    assert!(notes_of(&all, 1).is_err());
    assert!(notes_of(&all, 3).is_err());
    assert!(notes_of(&[255; 9], 1).is_err());
    assert!(matches!(notes_of(&[], 2), Ok(Notes::TooLong)));
}

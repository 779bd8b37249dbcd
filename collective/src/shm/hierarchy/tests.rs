//! Tests of a host's memory without a network: leaders exchange messages over channels. Miri runs
//! these tests and checks that ranks never access memory that another rank uses.

use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use super::*;
use crate::Fence;
use crate::algorithm::schedule::Content;
use crate::net::progress::Progress;
use crate::shm::Memory;

#[test]
fn every_rank_of_every_host_has_the_same_total_and_all_notes() {
    // Chunks of five blocks, more than there are slots.
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
                for region in regions(hosts.ranks(host)) {
                    let (rank, link) =
                        (hosts.ranks(host)[ranks.len() - hosts.ranks(host)[0]], link.take());
                    let hierarchy = Hierarchy::new(hosts.clone(), host, region);
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

/// Runs two sums on one rank; returns the notes and the total of the second one.
fn run(
    mut hierarchy: Hierarchy,
    rank: usize,
    len: usize,
    link: Option<Link>,
) -> (Vec<Vec<u8>>, Vec<f32>) {
    let (registration, progress) = (Fence::new().register(1).unwrap(), Progress::new());
    let src: Vec<f32> = (0..len).map(|at| (rank + at % 7) as f32).collect();
    let (mut dst, mut notes) = (vec![f32::NAN; len], Notes::TooLong);
    for sequence in 0..2 {
        dst.fill(f32::NAN);
        let (registration, progress) = (&registration, &progress);
        let context = WaitContext { host: None, ring: None, registration, progress, sequence };
        let note = [rank as u8; 3];
        notes = match &link {
            None => hierarchy.run_follower(context, &note, &src, &mut dst).unwrap(),
            Some(link) => lead(&mut hierarchy, context, &note, link, &src, &mut dst),
        };
    }
    let Notes::All(notes) = notes else { panic!("notes are short") };
    (notes, dst)
}

/// Like [`Hierarchy::run_leader`], over channels.
fn lead(
    hierarchy: &mut Hierarchy,
    context: WaitContext<'_>,
    note: &[u8],
    (next, prev): &Link,
    src: &[f32],
    dst: &mut [f32],
) -> Notes {
    let (rank_info, span) = (hierarchy.host, span(src.len()));
    let (own, mut leader_side) = hierarchy.begin_leader(context, note, src.len()).unwrap();
    let mut notes = vec![Vec::new(); rank_info.world];
    notes[rank_info.rank] = own.encode();
    let mut payload = Payload::new(Body::Sum { src, dst }, notes).of_leader(leader_side.is_some());
    let mut schedule = Schedule::all_reduce(rank_info, span);
    while !schedule.is_done() {
        if let Some(piece) = schedule.next_send() {
            if let Some(side) = &mut leader_side {
                side.before_send(&piece, &mut payload).unwrap();
            }
            payload.prepare(&piece);
            let (note, body) = payload.send_bufs(&piece);
            next.send((note.to_vec(), body.to_vec())).unwrap();
            schedule.on_sent();
            continue;
        }
        let piece = schedule.next_receive().unwrap();
        let (note, body) = prev.recv().unwrap();
        if piece.note {
            payload.expect_note(&piece, note.len());
        }
        let recv_buf = payload.recv_bufs(&piece);
        recv_buf.0.copy_from_slice(&note);
        recv_buf.1.copy_from_slice(&body);
        payload.on_received(&piece);
        if let Some(side) = &mut leader_side {
            side.after_receive(&piece, &mut payload).unwrap();
        }
        schedule.on_received();
    }
    drop(leader_side);
    let all = payload.into_notes();
    hierarchy.finish_leader(&all, src.len()).unwrap()
}

/// Creates one region for all ranks of a host, in one memory; none for a single rank.
fn regions(ranks: &[usize]) -> Vec<Option<SharedRegion>> {
    let world = ranks.len();
    if world == 1 {
        return vec![None];
    }
    let memories = Memory::of_threads(Hierarchy::bytes(world), world).into_iter().enumerate();
    let region = |(rank, memory)| {
        SharedRegion::new(memory, RankInfo { rank, world }, ranks.to_vec(), Vec::new()).spinning()
    };
    memories.map(region).map(Some).collect()
}

/// Channels to the next leader and from the previous one.
type Link = (Sender<Message>, Receiver<Message>);

/// A note and elements.
type Message = (Vec<u8>, Vec<u8>);

#[test]
fn a_host_orders_blocks_like_its_leaders_schedule() {
    for hosts in 2..=5 {
        for host in 0..hosts {
            let (rank_info, span) =
                (RankInfo { rank: host, world: hosts }, Span { len: 103, segment_len: 4 });
            let mut schedule = Schedule::all_reduce(rank_info, span);
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
            assert_eq!(order(rank_info, host, span), sums, "host {host} of {hosts}");
            assert_eq!(order(rank_info, host + 1, span), totals, "host {host} of {hosts}");
        }
    }
}

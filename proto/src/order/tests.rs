use std::num::NonZeroU64;

use super::*;

fn order(mode: ShuffleMode, seed: u64, files: &[u64], block: u64, buffer: u64) -> Order {
    let shuffle = Shuffle { mode, buffer: NonZeroU64::new(buffer) };
    Order::new(shuffle, seed, files, Access::Block { records: block })
}

fn whole(epoch: u32, end: u64) -> RecordRange {
    RecordRange { epoch, start: 0, end }
}

#[test]
fn every_record_has_one_position_in_each_epoch() {
    for files in [&[1][..], &[2], &[10], &[5, 0, 1, 7, 10], &[64, 64], &[1000, 3]] {
        let total: u64 = files.iter().sum();
        for mode in [ShuffleMode::Block, ShuffleMode::None, ShuffleMode::Record] {
            for (block, buffer) in [(1, 1), (3, 8), (8, 3), (100, 100)] {
                for epoch in 0..3 {
                    let order = order(mode, 7, files, block, buffer);
                    let mut records = order.records(whole(epoch, total));
                    let positions = records.iter().map(|record| order.position(epoch, *record));
                    assert_eq!(
                        Vec::from_iter(positions),
                        Vec::from_iter(0..total),
                        "{mode:?} {files:?} {block} {buffer}, epoch {epoch}"
                    );
                    records.sort_unstable();
                    assert_eq!(records, Vec::from_iter(0..total), "{mode:?} {files:?} {block}");
                }
            }
        }
    }
}

/// Checkpoints hold positions, so these numbers are a file format.
#[test]
fn an_order_is_the_same_for_ever() {
    const RECORDS: [u64; 4] = [520_644_920, 513_250_872, 912_630_742, 962_140_099];
    const BLOCKS: [u64; 4] = [459_348_695, 359_214_025, 359_214_393, 465_825_976];
    let first = |mode| order(mode, 42, &[1_000_000_007], 1000, 5000);
    let positions = RecordRange { epoch: 3, start: 1_000_000, end: 1_000_004 };
    assert_eq!(first(ShuffleMode::Record).records(positions), RECORDS);
    assert_eq!(first(ShuffleMode::Block).records(positions), BLOCKS);
    let small = order(ShuffleMode::Record, 0, &[10], 1, 1);
    assert_eq!(small.records(whole(0, 10)), [1, 3, 5, 2, 6, 9, 0, 8, 7, 4]);
    let blocks = order(ShuffleMode::Block, 0, &[10, 6], 4, 8);
    let expected = [12, 4, 15, 7, 11, 13, 14, 6, 10, 5, 2, 1, 9, 8, 0, 3];
    assert_eq!(blocks.records(whole(1, 16)), expected);
}

#[test]
fn seeds_and_epochs_have_orders_of_their_own() {
    for mode in [ShuffleMode::Block, ShuffleMode::Record] {
        let records = |seed, epoch| order(mode, seed, &[1000], 10, 100).records(whole(epoch, 1000));
        assert_ne!(records(1, 0), records(2, 0));
        assert_ne!(records(1, 0), records(1, 1));
        assert_eq!(records(1, 1), records(1, 1));
    }
}

#[test]
fn positions_are_read_in_parts_of_any_size() {
    for mode in [ShuffleMode::Block, ShuffleMode::None, ShuffleMode::Record] {
        let order = order(mode, 3, &[90, 10], 8, 30);
        let parts = [0..1, 1..40, 40..41, 41..100];
        let joined: Vec<u64> = parts
            .into_iter()
            .flat_map(|Range { start, end }| order.records(RecordRange { epoch: 2, start, end }))
            .collect();
        assert_eq!(joined, order.records(whole(2, 100)));
    }
}

/// Records that are neighbours in the data are far apart in the order: the mean distance of the
/// records at neighbouring positions is that of two random records, a third of their number.
#[test]
fn a_shuffled_order_is_random() {
    let distance = |order: &Order, total: u64| {
        let records = order.records(whole(0, total));
        let sum: u64 = records.windows(2).map(|pair| pair[0].abs_diff(pair[1])).sum();
        sum as f64 / (total - 1) as f64 / total as f64
    };
    for total in [1000, 4096, 100_000] {
        let all = distance(&order(ShuffleMode::Record, 1, &[total], 1, 1), total);
        assert!((0.31..0.36).contains(&all), "{total}: {all}");
    }
    let blocks = distance(&order(ShuffleMode::Block, 1, &[100_000], 100, 1000), 100_000);
    assert!((0.25..0.36).contains(&blocks), "{blocks}");
}

/// Each sixteenth of the positions holds about a sixteenth of each sixteenth of the records.
#[test]
fn records_are_spread_evenly() {
    let total = 1 << 16;
    let records = order(ShuffleMode::Record, 5, &[total], 1, 1).records(whole(9, total));
    let mut counts = [[0_i64; 16]; 16];
    for (position, record) in records.into_iter().enumerate() {
        counts[position >> 12][(record >> 12) as usize] += 1;
    }
    // Mean 256, standard deviation 15.5 for a random permutation.
    let most = counts.iter().flatten().map(|count| (count - 256).abs()).max().unwrap();
    assert!(most < 80, "{most}");
}

#[test]
fn a_buffer_mixes_the_blocks_that_it_consists_of_and_no_others() {
    let order = order(ShuffleMode::Block, 11, &[1000], 10, 50);
    for buffer in 0..20 {
        let positions = RecordRange { epoch: 0, start: 50 * buffer, end: 50 * (buffer + 1) };
        let records = order.records(positions);
        let mut blocks: Vec<u64> = records.iter().map(|record| record / 10).collect();
        blocks.sort_unstable();
        blocks.dedup();
        assert_eq!(blocks.len(), 5, "{records:?}");
        let runs = records.windows(2).filter(|pair| pair[0] / 10 == pair[1] / 10).count();
        assert!(runs < 30, "{records:?}");
    }
    assert_eq!((order.block(0), order.block(19)), (Some(0..10), Some(10..20)));
}

#[test]
fn the_reader_decides_what_is_shuffled_unless_the_user_does() {
    let data = [100];
    let mode =
        |mode, access| Order::new(Shuffle { mode, buffer: None }, 0, &data, access).name().mode;
    let block = Access::Block { records: 10 };
    assert_eq!(mode(ShuffleMode::Auto, Access::Record), ShuffleMode::Record);
    assert_eq!(mode(ShuffleMode::Auto, block), ShuffleMode::Block);
    assert_eq!(mode(ShuffleMode::Record, block), ShuffleMode::Record);
    assert_eq!(mode(ShuffleMode::Block, Access::Record), ShuffleMode::Block);
    assert_eq!(mode(ShuffleMode::None, block), ShuffleMode::None);
}

#[test]
fn a_report_names_records_in_few_ranges() {
    let order = order(ShuffleMode::Record, 2, &[10_000], 1, 1);
    assert_eq!(order.ranges(&[whole(4, 10_000)]), [whole(4, 10_000)]);
    let some = order.ranges(&[RecordRange { epoch: 4, start: 0, end: 5000 }]);
    assert_eq!(some.len(), RANGES_MAX);
    assert!(some.windows(2).all(|pair| pair[0].end < pair[1].start));
}

/// For many data sets, seeds and epochs. Every second one has files that are shorter than a block.
#[test]
fn the_position_of_a_record_is_found_without_its_epoch() {
    let draw = permuted(1 << 40, 1, 1);
    let mut draws = (0..).map(draw);
    let mut below = |end: u64| draws.next().expect("it has no end") % end;
    for case in 0..2000 {
        let longest = if case % 2 == 0 { 40 } else { 1 << below(34) };
        let files: Vec<u64> = (0..=below(12)).map(|_| below(longest + 1)).collect();
        let total: u64 = files.iter().sum();
        let modes = [ShuffleMode::Block, ShuffleMode::None, ShuffleMode::Record];
        let mode = modes[below(3) as usize];
        let (seed, epoch) = (below(1 << 30), below(1 << 20) as u32);
        let least = total >> 9;
        let (block, buffer) = (1 + least + below(100), 1 + least + below(1000));
        let order = order(mode, seed, &files, block, buffer);
        assert_eq!(Order::named(order.name(), &files).name(), order.name());
        for _ in 0..if total == 0 { 0 } else { 20 } {
            let at = below(total);
            let record = order.records(RecordRange { epoch, start: at, end: at + 1 })[0];
            assert_eq!(
                order.position(epoch, record),
                at,
                "case {case}: {mode:?} {files:?}, seed {seed}, epoch {epoch}, {block}, {buffer}"
            );
        }
    }
}

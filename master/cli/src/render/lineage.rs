//! When a record was trained, as a table and as JSON.

use std::fmt::Write as _;

use elasticdl_master::lineage::{EpochLineage, Lineage, RecordPart};
use elasticdl_proto::WorkerId;

use crate::progress::one_line;

/// The lineage as JSON.
pub(crate) fn to_json(lineage: &Lineage) -> String {
    serde_json::to_string_pretty(lineage).expect("the keys of a lineage are strings") + "\n"
}

/// The lineage as a table.
pub(crate) fn to_table(lineage: &Lineage) -> String {
    let Lineage { job, state, file, record_in_file, part, record, .. } = lineage;
    let mut text = format!(
        "job {job} ({state}): record {record_in_file} of {}{}\n",
        one_line(file),
        match (part, record) {
            (RecordPart::Training, Some(record)) if record != record_in_file =>
                format!(", record {record} of the {} that are trained", lineage.records_per_epoch),
            _ => String::new(),
        }
    );
    if !lineage.epochs.is_empty() {
        writeln!(text, "order: {}", lineage.order).expect("a string takes any text");
        add_rows(&mut text, &lineage.epochs);
    }
    for note in &lineage.notes {
        writeln!(text, "{}", one_line(note)).expect("a string takes any text");
    }
    text
}

fn add_rows(text: &mut String, epochs: &[EpochLineage]) {
    let head =
        ["EPOCH", "POSITION", "STEP", "IN STEP", "STATE", "GENERATION", "WORKERS", "CHECKPOINT"];
    let cells: Vec<[String; 8]> =
        std::iter::once(head.map(String::from)).chain(epochs.iter().map(to_cells)).collect();
    let width =
        |column: usize| cells.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 8] = std::array::from_fn(width);
    for row in &cells {
        let padded: Vec<String> =
            row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        writeln!(text, "{}", padded.join("  ").trim_end()).expect("a string takes any text");
    }
}

fn to_cells(row: &EpochLineage) -> [String; 8] {
    let dash = || "-".to_owned();
    let in_step = row.step_positions.map(|(start, end)| {
        format!("{} of {}", row.position.saturating_sub(start), end.saturating_sub(start))
    });
    let again = if row.was_repeated { ", again" } else { "" };
    [
        row.epoch.to_string(),
        row.position.to_string(),
        row.step.map_or_else(dash, |step| step.to_string()),
        in_step.unwrap_or_else(dash),
        format!("{}{again}", row.state.name()),
        row.generation.map_or_else(dash, |generation| generation.to_string()),
        row.workers.as_deref().map_or_else(dash, workers),
        row.checkpoint.as_ref().map_or_else(dash, |known| known.name.clone()),
    ]
}

/// The first few workers, and the number of others.
fn workers(workers: &[WorkerId]) -> String {
    let shown: Vec<String> = workers.iter().take(SHOWN).map(ToString::to_string).collect();
    let more = match workers.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    shown.join(",") + &more
}

/// Number of workers that a row names.
const SHOWN: usize = 8;

#[cfg(test)]
mod tests {
    use elasticdl_master::lineage::{CompleteCheckpoint, StepState};
    use elasticdl_proto::{Generation, OrderName, ShuffleMode};

    use super::*;

    #[test]
    fn a_table_has_a_row_for_each_epoch_and_says_what_is_not_known() {
        let row = EpochLineage {
            epoch: 0,
            state: StepState::Trained,
            position: 70,
            step: Some(2),
            step_positions: Some((64, 100)),
            generation: Some(Generation(3)),
            workers: Some((1..=10).map(WorkerId).collect()),
            was_repeated: true,
            checkpoint: Some(CompleteCheckpoint { step: 1, name: "step-1".into() }),
        };
        let later = EpochLineage {
            epoch: 1,
            state: StepState::ToCome,
            position: 9,
            step: None,
            step_positions: None,
            generation: None,
            workers: None,
            was_repeated: false,
            checkpoint: None,
        };
        let lineage = Lineage {
            job: "mnist".into(),
            state: "running".into(),
            file: "d/b".into(),
            record_in_file: 7,
            part: RecordPart::Training,
            record: Some(57),
            records_per_epoch: 100,
            order: OrderName { mode: ShuffleMode::Record, seed: 3, block: 0, buffer: 0 },
            epochs: vec![row, later],
            notes: vec!["a note".into()],
        };
        let expected = "\
job mnist (running): record 7 of d/b, record 57 of the 100 that are trained
order: --shuffle record --seed 3
EPOCH  POSITION  STEP  IN STEP  STATE           GENERATION  WORKERS                     CHECKPOINT
0      70        2     6 of 36  trained, again  3           1,2,3,4,5,6,7,8 and 2 more  step-1
1      9         -     -        to-come         -           -                           -
a note
";
        assert_eq!(to_table(&lineage), expected);
        let json: serde_json::Value = serde_json::from_str(&to_json(&lineage)).unwrap();
        let row = &json["epochs"][0];
        assert_eq!((&row["step_positions"][1], &row["generation"]), (&100.into(), &3.into()));
        assert_eq!(
            (&json["epochs"][1]["state"], &json["part"]),
            (&"to-come".into(), &"training".into())
        );
    }
}

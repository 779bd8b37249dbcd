//! Decodes reports of commits.

use super::decode::{Checked, generation, ranges, within};
use super::v1;
use crate::limits::{
    DATASET_RECORDS_MAX, METRIC_NAME_BYTES_MAX, METRICS_MAX, PHASE_US_MAX, STEPS_MAX, WORKERS_MAX,
    clip,
};
use crate::message::{Committed, RankStep, StepTimes};
use crate::row_touches::TablesStatus;

pub(super) fn committed(report: v1::Committed) -> Checked<Committed> {
    let ranks = report.compute_us.len() as u64;
    within("committed.compute_us (ranks)", ranks, 0, u64::from(WORKERS_MAX))?;
    let others =
        [&report.input_us, &report.rank_records, &report.checkpoint_us, &report.table_bytes];
    if others.iter().any(|list| list.len() as u64 != ranks) {
        return Err(format!("committed: a list does not have one element per rank, {ranks}"));
    }
    let ranks = report.compute_us.iter().enumerate();
    let rank_step = |(rank, &compute_us): (usize, &u64)| {
        let [input_us, records, checkpoint_us, table_bytes] = others.map(|list| list[rank]);
        let compute_us = within("committed.compute_us", compute_us, 0, PHASE_US_MAX)?;
        let input_us = within("committed.input_us", input_us, 0, PHASE_US_MAX)?;
        let records = within("committed.rank_records", records, 0, DATASET_RECORDS_MAX)?;
        let checkpoint_us = within("committed.checkpoint_us", checkpoint_us, 0, PHASE_US_MAX)?;
        Ok(RankStep { records, compute_us, input_us, checkpoint_us, table_bytes })
    };
    Ok(Committed {
        generation: generation("committed.generation", report.generation)?,
        step: within("committed.step", report.step, 0, STEPS_MAX)?,
        ranges: ranges("committed.ranges", report.ranges)?,
        // A value that is not finite is valid: it shows the user that the model diverges.
        loss_sum: report.loss_sum,
        records: within("committed.records", report.records, 0, DATASET_RECORDS_MAX)?,
        metrics: report.metrics.into_iter().take(METRICS_MAX).map(name_clipped).collect(),
        ranks: ranks.map(rank_step).collect::<Checked<Vec<RankStep>>>()?,
        times: step_times(report.times.unwrap_or_default())?,
        last: report.last.map(step_times).transpose()?.map(Box::new),
        steps_skipped: within("committed.steps_skipped", report.steps_skipped, 0, STEPS_MAX)?,
        // Like the loss, a rate of the user's own schedule may not be finite.
        learning_rate: report.learning_rate.filter(|rate| rate.is_finite()),
        first_loss: report.first_loss.filter(|loss| loss.is_finite()),
        last_loss: report.last_loss.filter(|loss| loss.is_finite()),
        epoch_step: report.epoch_step.filter(|&step| step <= report.step),
        tables: report.tables.map(|v1::Tables { rows, touches, shards_at_risk }| {
            Box::new(TablesStatus { rows, touches, shards_at_risk })
        }),
        steps_audited: within("committed.steps_audited", report.steps_audited, 0, STEPS_MAX)?,
    })
}

fn name_clipped((name, sum): (String, f64)) -> (String, f64) {
    (clip(name, METRIC_NAME_BYTES_MAX), sum)
}

fn step_times(times: v1::StepTimes) -> Checked<StepTimes> {
    Ok(StepTimes {
        steps: within("times.steps", times.steps, 0, STEPS_MAX)?,
        step_us: within("times.step_us", times.step_us, 0, PHASE_US_MAX)?,
        reduce_us: within("times.reduce_us", times.reduce_us, 0, PHASE_US_MAX)?,
    })
}

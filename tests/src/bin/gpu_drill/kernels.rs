//! The phase `kernels`.

use std::env;
use std::ffi::OsString;

use elasticdl_proto::Summary;
use elasticdl_tests::{Ended, counting_data, each_once, exported_counts};

use crate::model::{self, BATCH, OPTIMIZERS, STEPS};
use crate::{Drill, Fallible};

/// Shows that the kernels, compiled by this machine's NVRTC and translated by its driver, compute
/// what the CPU does. A job of one worker for each optimizer ends with the CPU's parameters, bit
/// for bit; their micro-batches are added on the GPU. Clipping, whose norm is summed in another
/// order, gives them up to rounding. One of its steps has a NaN and changes nothing. So it is if
/// one of two workers finds the NaN, and replicas that differ are found by their digests.
pub(crate) fn kernels(drill: &mut Drill) -> Fallible<()> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    counting_data(&data, (STEPS * BATCH) as u64, 1)?;
    // A remainder in the last block; from 2^20 on, several elements for each thread.
    let len = drill.arguments.bytes_max.div_ceil(4).min(1 << 20) + 3;
    let mut wrong = Vec::new();
    for (name, has_same_bits) in OPTIMIZERS {
        drill.check_time()?;
        let exported = folder.path().join(format!("{name}.safetensors"));
        let program = env::current_exe()?.into_os_string();
        let length = len.to_string();
        let options = ["--parameters", &length, "--optimizer", name].map(OsString::from);
        let ended = drill
            .job(&folder.path().join(name), &[vec![program], options.to_vec()].concat())?
            .option("training-data", &data)
            .option("num-workers", "1")
            .option("global-batch-size", BATCH.to_string())
            .option("on-nonfinite", "skip")
            .option("export", &exported)
            .run();
        let summary = completed(&ended).map_err(|error| format!("{name}: {error}"))?;
        if summary.steps_skipped != 1 {
            return Err(format!("{name}: {} steps were skipped", summary.steps_skipped).into());
        }
        let (found, expected) = (exported_counts(&exported), model::trained_on_cpu(len, name)?);
        let difference = Difference::of(&found, &expected)?;
        if has_same_bits {
            let what = format!("{name}: of {len} parameters, other bits than on the CPU");
            drill.add("kernels", what, difference.other_bits as f64, "");
        } else {
            let what = format!("{name}: largest difference from the CPU");
            drill.add("kernels", what, difference.largest * 1e6, "ppm");
        }
        let is_right =
            if has_same_bits { difference.other_bits == 0 } else { difference.largest < 1e-5 };
        if !is_right {
            wrong.push(format!("{name}: another result than on the CPU"));
        }
    }
    for check in [finite_check, digests] {
        wrong.extend(check(drill).err().map(|error| error.to_string()));
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("; ").into()) }
}

/// A NaN in the last element of a gradient is found, on whichever of two workers it is.
fn finite_check(drill: &mut Drill) -> Fallible<()> {
    let nan = ["--nan-at", "599"];
    let ended = pair(drill, &nan, &[("num-epochs", "1"), ("on-nonfinite", "skip")])?;
    let summary = completed(&ended)?;
    if summary.steps_skipped != 1 || summary.records != each_once(600) {
        return Err(format!("a NaN: {} steps were skipped", summary.steps_skipped).into());
    }
    drill.add("kernels", "finite check: steps skipped for a NaN in one gradient", 1.0, "");
    Ok(())
}

/// Digests of two replicas agree until one of them changes an element.
fn digests(drill: &mut Drill) -> Fallible<()> {
    let ended = pair(drill, &["--drift-at", "5"], &[("num-epochs", "10")])?;
    // Of two replicas, none is trusted: the job begins anew.
    if !ended.output.contains("replicas differ by") {
        return Err(format!("replicas that differ were not found: {}", ended.output).into());
    }
    drill.add("kernels", "digests: replicas that differ were found", 1.0, "");
    Ok(())
}

/// Runs a job of two workers on 600 records.
fn pair(drill: &Drill, model: &[&str], options: &[(&str, &str)]) -> Fallible<Ended> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    counting_data(&data, 600, 2)?;
    let mut program = vec![env::current_exe()?.into_os_string()];
    program.extend(["--records", "600", "--gpu"].iter().chain(model).map(OsString::from));
    let mut command = drill
        .job(&folder.path().join("job"), &program)?
        .option("training-data", &data)
        .option("num-workers", "2")
        // No step is made by one worker alone.
        .option("min-workers", "2")
        .option("global-batch-size", "30");
    for (name, value) in options {
        command = command.option(name, *value);
    }
    Ok(command.run())
}

/// The summary of a job that has completed; otherwise its error.
pub(crate) fn completed(ended: &Ended) -> Fallible<&Summary> {
    if ended.code == Some(0) {
        return Ok(ended.summary());
    }
    Err(format!("a job ended: {}", ended.cause()).into())
}

/// How two results differ.
struct Difference {
    /// Number of elements whose bits differ.
    other_bits: usize,
    /// Largest relative difference; of elements near zero, the absolute one.
    largest: f64,
}

impl Difference {
    fn of(found: &[f32], expected: &[f32]) -> Fallible<Self> {
        if found.len() != expected.len() {
            return Err(format!("{} parameters of {}", found.len(), expected.len()).into());
        }
        let pairs = || found.iter().zip(expected);
        let relative = |(a, b): (&f32, &f32)| match a - b {
            difference if difference.is_finite() => {
                f64::from(difference.abs()) / f64::from(b.abs()).max(1.0)
            }
            _ => f64::INFINITY,
        };
        Ok(Self {
            other_bits: pairs().filter(|(a, b)| a.to_bits() != b.to_bits()).count(),
            largest: pairs().map(relative).fold(0.0, f64::max),
        })
    }
}

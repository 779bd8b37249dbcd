//! `elasticdl convert`: writes the model of a checkpoint as a safetensors file, or the rows of an
//! exported model as Parquet.

use std::ffi::OsString;
use std::process::Command;

use clap::Args;

use super::start::find_program;
use crate::args::parse_uri;
use crate::process::{EXIT_OK, Failure, cannot, print_line};
use crate::scratch::Scratch;

/// Arguments of `elasticdl convert`.
#[derive(Args, Debug)]
#[command(after_long_help = AFTER_HELP)]
pub(crate) struct ConvertArgs {
    /// The checkpoint: its folder, a path or s3://, gs://, az://. For Parquet, an exported model.
    #[arg(value_name = "CHECKPOINT", value_parser = parse_uri)]
    pub(crate) checkpoint: String,

    /// The file: a path or s3://, gs://, az://. An existing file is replaced. NAME.parquet is a new
    /// or empty folder, into which the rows of each table are written as TABLE.parquet.
    #[arg(value_name = "FILE", value_parser = parse_uri)]
    pub(crate) file: String,

    /// The training program and its arguments. Without a `/` the program is looked up in $PATH.
    #[arg(last = true, required = true, value_names = ["PROGRAM", "ARGS"])]
    pub(crate) program: Vec<OsString>,
}

/// Asks the program to convert the checkpoint. Returns the exit code.
pub(super) fn convert(args: &ConvertArgs) -> Result<u8, Failure> {
    let (program, words) = args.program.split_first().expect("clap asks for one");
    let program = find_program(program)?;
    let scratch = Scratch::create(&std::env::temp_dir(), "elasticdl-convert-")?;
    let done = scratch.path.join("done");
    let status = Command::new(&program)
        .args(words)
        .env("ELASTICDL_CONVERT_FROM", &args.checkpoint)
        .env("ELASTICDL_CONVERT_TO", &args.file)
        .env("ELASTICDL_CONVERT_DONE", &done)
        .status()
        .map_err(cannot(&format!("run {}", program.display())))?;
    if status.success() {
        // The program creates the file when all is written.
        return match done.exists() {
            true => {
                let is_rows = args.file.trim_end_matches('/').ends_with(".parquet");
                let what = if is_rows { "has the rows of" } else { "holds the model of" };
                print_line(&format!("{} {what} {}", args.file, args.checkpoint));
                Ok(EXIT_OK)
            }
            false => Err(Failure::failed(format!(
                "{} was not written: {} ended without an error; is it an elasticdl program, one \
                 that calls elasticdl::run() or elasticdl.torch.join()?",
                args.file,
                program.display()
            ))),
        };
    }
    // The program has printed why.
    Err(Failure::failed(format!("{} was not written: {} ended with {status}", args.file, {
        program.display()
    })))
}

const AFTER_HELP: &str = "\
A checkpoint has the parameters without the names and shapes of their tensors, which PROGRAM knows:
it is run once, without a job, and reads and writes the files.

Example:
  elasticdl convert checkpoints/step-000000000400-0123abcd-g1 mnist.safetensors \\
      -- ./target/release/mnist

The rows of an exported model with tables, a file for each table (key, touches, embedding):
  elasticdl convert ctr.safetensors ctr.parquet -- ./target/release/ctr

Exit codes:
  0  the file is written
  1  it is not; the error of PROGRAM is printed
  2  invalid command line";

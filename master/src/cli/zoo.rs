//! `elasticdl zoo`: from an idea to an image.
//!
//! `init` writes a crate with a model, its tests, data and a Dockerfile; `build` and `push` call
//! the container tool that is there. Nothing of a crate is kept anywhere else: what `build` needs
//! to know, the Dockerfile says.

mod source;
mod tool;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::io::{Write as _, stderr, stdout};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};

pub use source::Source;
pub use tool::Tool;

use super::{EXIT_OK, Failure, job_options};
use crate::kube::options;

/// What `elasticdl zoo` is told.
#[derive(Args, Debug)]
pub struct ZooArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: ZooCommand,
}

/// What to do with a model of your own.
#[derive(Debug, Subcommand)]
pub enum ZooCommand {
    /// Build a crate's image, by its Dockerfile.
    Build(BuildArgs),
    /// Write a crate with a small model, to be made yours.
    ///
    /// It has tests, sample data, a Dockerfile and a README that says how to train it. Nothing is
    /// overwritten.
    Init(InitArgs),
    /// Push an image to its registry.
    Push(PushArgs),
}

/// What `elasticdl zoo init` is told.
#[derive(Args, Debug)]
pub struct InitArgs {
    /// The folder, made if it is not there.
    #[arg(value_name = "PATH", default_value = ".")]
    pub path: PathBuf,

    /// The crate's name. [default: the folder's]
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    pub name: Option<String>,

    /// Where the crate takes elasticdl from: a checkout's folder, a version, or a git URL, perhaps
    /// with #REVISION.
    ///
    /// By default the checkout that this command was built from, if it is still there, or else this
    /// command's version.
    #[arg(long, value_name = "PATH-OR-VERSION", value_parser = Source::parse)]
    pub elasticdl: Option<Source>,
}

/// What `elasticdl zoo build` is told.
#[derive(Args, Debug)]
pub struct BuildArgs {
    /// The crate's folder.
    #[arg(value_name = "PATH", default_value = ".")]
    pub path: PathBuf,

    /// The image's name.
    #[arg(long, value_name = "IMG", value_parser = options::parse_image)]
    pub image: String,

    /// A value for one of the Dockerfile's arguments; may be given several times.
    #[arg(long, value_name = "NAME=VALUE")]
    pub build_arg: Vec<String>,

    /// The container tool. [default: the first one there of docker, podman, nerdctl, buildah]
    #[arg(long, value_name = "TOOL")]
    pub tool: Option<Tool>,
}

/// What `elasticdl zoo push` is told.
#[derive(Args, Debug)]
pub struct PushArgs {
    /// The image's name.
    #[arg(value_name = "IMG", value_parser = options::parse_image)]
    pub image: String,

    /// The container tool. [default: as for `build`]
    #[arg(long, value_name = "TOOL")]
    pub tool: Option<Tool>,
}

/// Does it; the exit code, which for `build` and `push` is the tool's.
pub(super) fn zoo(args: &ZooArgs) -> Result<u8, Failure> {
    match &args.command {
        ZooCommand::Build(args) => build(args),
        ZooCommand::Init(args) => init(args),
        ZooCommand::Push(args) => {
            tool::run(args.tool, vec!["push".into(), args.image.clone().into()])
        }
    }
}

fn init(args: &InitArgs) -> Result<u8, Failure> {
    let at = args.path.display();
    let failed = |what: &str, error: &dyn std::fmt::Display| {
        Failure::failed(format!("{at}: {what}: {error}"))
    };
    let name = match &args.name {
        Some(name) => name.clone(),
        None => name_of(&args.path)?,
    };
    let source = args.elasticdl.clone().unwrap_or_else(Source::own);
    let files = files(&name, &source);
    let there: Vec<_> = files
        .iter()
        .filter(|(file, _)| fs::symlink_metadata(args.path.join(file)).is_ok())
        .collect();
    if !there.is_empty() {
        let there: Vec<_> = there.iter().map(|(file, _)| *file).collect();
        return Err(Failure::usage(format!(
            "{at} has {} already, and nothing is overwritten; name a new folder",
            there.join(", ")
        )));
    }
    for (file, text) in files {
        let path = args.path.join(file);
        let folder = path.parent().unwrap_or(&args.path);
        fs::create_dir_all(folder).map_err(|error| failed("can't make the folder", &error))?;
        // Whoever was faster than the look above is not overwritten either.
        let made = fs::File::create_new(&path).and_then(|mut made| made.write_all(text.as_bytes()));
        made.map_err(|error| failed(&format!("can't write {file}"), &error))?;
    }
    let _ =
        writeln!(stdout(), "{at} has the model `{name}` now; its README.md says how to train it");
    Ok(EXIT_OK)
}

/// The crate's files and what is in them.
fn files(name: &str, source: &Source) -> [(&'static str, String); 6] {
    let fill = |template: &str| {
        let filled =
            template.replace("{{name}}", name).replace("{{dependency}}", &source.dependency());
        filled.replace("{{sources}}", &source.copies()).replace("{{command}}", &source.command())
    };
    [
        ("Cargo.toml", fill(include_str!("../../templates/model-crate/Cargo.toml.template"))),
        ("src/main.rs", fill(include_str!("../../templates/model-crate/src/main.rs"))),
        ("data/points.csv", points()),
        ("Dockerfile", fill(include_str!("../../templates/model-crate/Dockerfile"))),
        (".dockerignore", fill(include_str!("../../templates/model-crate/dockerignore"))),
        ("README.md", fill(include_str!("../../templates/model-crate/README.md"))),
    ]
}

/// Points near y = 2·x - 0.5, the same each time.
fn points() -> String {
    let mut text = String::from("x,y\n");
    for i in 0..400_i32 {
        let x = f64::from(i) / 200.0 - 1.0;
        // A walk through the residues of a prime: as good as noise here.
        let noise = f64::from(i * 7919 % 101 - 50) / 1000.0;
        writeln!(text, "{x:.3},{:.3}", 2.0 * x - 0.5 + noise).expect("a string takes all text");
    }
    text
}

fn build(args: &BuildArgs) -> Result<u8, Failure> {
    let dockerfile = args.path.join("Dockerfile");
    let text = fs::read_to_string(&dockerfile).map_err(|error| {
        let at = args.path.display();
        Failure::usage(format!(
            "can't read {}: {error}; PATH must be a crate's folder, for example one that `elasticdl zoo init {at}` makes",
            dockerfile.display()
        ))
    })?;
    let mut words: Vec<OsString> = vec!["build".into(), "--tag".into(), args.image.clone().into()];
    for value in &args.build_arg {
        words.extend(["--build-arg".into(), value.into()]);
    }
    if let Some(folder) = source::context(&text) {
        words.extend(["--build-context".into(), format!("{}={folder}", source::CONTEXT).into()]);
    }
    words.extend(["--file".into(), dockerfile.into(), args.path.clone().into()]);
    tool::run(args.tool, words)
}

fn name_of(path: &Path) -> Result<String, Failure> {
    let absolute = std::path::absolute(path)
        .map_err(|e| Failure::usage(format!("{}: {e}", path.display())))?;
    let name = absolute.file_name().unwrap_or_default().to_string_lossy().into_owned();
    parse_name(&name).map_err(|why| {
        Failure::usage(format!("`{name}` can't be the crate's name: {why}; say --name NAME"))
    })
}

/// A name for a crate, a job and an image alike.
fn parse_name(text: &str) -> Result<String, String> {
    if RESERVED.contains(&text) {
        return Err("it has a meaning for cargo or Rust".into());
    }
    job_options::parse_job_name(text)
}

fn print_line(text: &str) {
    // With standard error closed there is nobody to tell.
    let _ = writeln!(stderr(), "{text}");
}

/// Names that cargo refuses, or warns of.
const RESERVED: [&str; 52] = [
    "abstract",
    "alloc",
    "as",
    "async",
    "await",
    "become",
    "box",
    "break",
    "build",
    "const",
    "continue",
    "core",
    "crate",
    "deps",
    "do",
    "dyn",
    "else",
    "enum",
    "examples",
    "extern",
    "false",
    "final",
    "fn",
    "for",
    "if",
    "impl",
    "in",
    "incremental",
    "let",
    "loop",
    "macro",
    "match",
    "mod",
    "move",
    "mut",
    "override",
    "priv",
    "proc-macro",
    "pub",
    "ref",
    "return",
    "self",
    "static",
    "std",
    "struct",
    "test",
    "trait",
    "true",
    "type",
    "use",
    "where",
    "while",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_fits_a_crate_a_job_and_an_image() {
        assert_eq!(parse_name("my-model2"), Ok("my-model2".into()));
        for bad in ["", "My", "2d", "a_b", "a.b", "test", "match", "a-", "ä"] {
            assert!(parse_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn templates_are_filled_to_the_last_blank() {
        let sources =
            ["0.1", "https://example.com/e.git#v1", concat!(env!("CARGO_MANIFEST_DIR"), "/..")];
        for source in sources {
            for (file, text) in files("my-model", &Source::parse(source).unwrap()) {
                assert!(!text.contains("{{") && !text.contains("}}"), "{source}: {file}: {text}");
            }
        }
    }
}

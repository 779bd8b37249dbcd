//! `elasticdl zoo`: creates a crate or a Python project for a model, and builds its image.
//!
//! `init` writes a model, data and a Dockerfile, from the templates in `master/cli/templates`.
//! `build` and `push` call an installed container tool. There is no state outside the crate:
//! `build` reads the Dockerfile.

mod samples;
mod source;
mod templates;
mod tool;

use std::ffi::OsString;
use std::fs;
use std::io::{Write as _, stdout};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use elasticdl_master::kube::options;

use source::Source;
use templates::Template;
use tool::Tool;

use crate::args::parse_job_name;
use crate::process::{EXIT_OK, Failure};

/// Arguments of `elasticdl zoo`.
#[derive(Args, Debug)]
pub(crate) struct ZooArgs {
    /// The command.
    #[command(subcommand)]
    pub(crate) command: ZooCommand,
}

/// Commands of `elasticdl zoo`.
#[derive(Debug, Subcommand)]
pub(crate) enum ZooCommand {
    /// Build the image of a model from its Dockerfile.
    Build(BuildArgs),
    /// Create a crate with a small model as a starting point.
    ///
    /// It has a Dockerfile and a README with the commands to train it; most templates have sample
    /// data. Existing files are not overwritten.
    Init(InitArgs),
    /// Push an image to its registry.
    Push(PushArgs),
}

/// Arguments of `elasticdl zoo init`.
#[derive(Args, Debug)]
pub(crate) struct InitArgs {
    /// Folder of the crate or project, created if it does not exist.
    #[arg(value_name = "PATH", default_value = ".")]
    pub(crate) path: PathBuf,

    /// The model to start from.
    #[arg(long, value_enum, default_value_t = Template::Linear)]
    pub(crate) template: Template,

    /// Create a Python project with a PyTorch model: --template python.
    #[arg(long, conflicts_with = "template")]
    pub(crate) python: bool,

    /// Name of the crate or project. [default: the name of the folder]
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    pub(crate) name: Option<String>,

    /// Source of the elasticdl dependency: the folder of a checkout, a version, or a git URL,
    /// optionally with #REVISION.
    ///
    /// The default is the checkout that this command was built from, if it still exists, else the
    /// version of this command.
    #[arg(long, value_name = "PATH-OR-VERSION", value_parser = Source::parse)]
    pub(crate) elasticdl: Option<Source>,
}

/// Arguments of `elasticdl zoo build`.
#[derive(Args, Debug)]
pub(crate) struct BuildArgs {
    /// Folder of the crate.
    #[arg(value_name = "PATH", default_value = ".")]
    pub(crate) path: PathBuf,

    /// Name of the image.
    #[arg(long, value_name = "IMG", value_parser = options::parse_image)]
    pub(crate) image: String,

    /// Value of a build argument of the Dockerfile; can be repeated.
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) build_arg: Vec<String>,

    /// Container tool. [default: the first installed one of docker, podman, nerdctl, buildah]
    #[arg(long, value_name = "TOOL")]
    pub(crate) tool: Option<Tool>,
}

/// Arguments of `elasticdl zoo push`.
#[derive(Args, Debug)]
pub(crate) struct PushArgs {
    /// Name of the image.
    #[arg(value_name = "IMG", value_parser = options::parse_image)]
    pub(crate) image: String,

    /// Container tool. [default: as for `build`]
    #[arg(long, value_name = "TOOL")]
    pub(crate) tool: Option<Tool>,
}

/// Runs the command. Returns its exit code; for `build` and `push` it is the tool's.
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
    let template = if args.python { Template::Python } else { args.template };
    let files = template.files(&name, &source);
    let existing: Vec<_> = files
        .iter()
        .filter(|(file, _)| fs::symlink_metadata(args.path.join(file)).is_ok())
        .collect();
    if !existing.is_empty() {
        let existing: Vec<_> = existing.iter().map(|(file, _)| *file).collect();
        return Err(Failure::usage(format!(
            "{at} has {} already, and files are not overwritten; name a new folder",
            existing.join(", ")
        )));
    }
    for (file, content) in files {
        let path = args.path.join(file);
        let folder = path.parent().unwrap_or(&args.path);
        fs::create_dir_all(folder).map_err(|error| failed("can't make the folder", &error))?;
        // `create_new` also protects files that appear after the check above.
        let made = fs::File::create_new(&path).and_then(|mut made| made.write_all(&content));
        made.map_err(|error| failed(&format!("can't write {file}"), &error))?;
    }
    let _ = writeln!(
        stdout(),
        "created the model `{name}` in {at}; its README.md has the commands to train it"
    );
    Ok(EXIT_OK)
}

fn build(args: &BuildArgs) -> Result<u8, Failure> {
    let dockerfile = args.path.join("Dockerfile");
    let text = fs::read_to_string(&dockerfile).map_err(|error| {
        let at = args.path.display();
        Failure::usage(format!(
            "can't read {}: {error}; PATH must be a model's folder, for example one that \
             `elasticdl zoo init {at}` makes",
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
        Failure::usage(format!("`{name}` can't be the crate's name: {why}; use --name NAME"))
    })
}

/// Checks a name that must be valid for a crate, a job and an image.
fn parse_name(text: &str) -> Result<String, String> {
    if RESERVED.contains(&text) {
        return Err("it is reserved by cargo or Rust".into());
    }
    parse_job_name(text)
}

/// Names that cargo rejects or warns about.
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
    fn a_name_is_valid_for_a_crate_a_job_and_an_image() {
        assert_eq!(parse_name("my-model2"), Ok("my-model2".into()));
        for bad in ["", "My", "2d", "a_b", "a.b", "test", "match", "a-", "ä"] {
            assert!(parse_name(bad).is_err(), "{bad}");
        }
    }
}

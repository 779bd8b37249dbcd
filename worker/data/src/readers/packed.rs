//! Text files, of which compressed ones are held in memory.
//!
//! A compressed file can be decompressed from its start only. So a worker decompresses it once and
//! holds it as blocks that are compressed one by one: a read decompresses the blocks that it needs.

use std::io::{self, BufRead, BufReader, Cursor, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flate2::bufread::MultiGzDecoder;

use super::files::{self, Source};
use crate::reader::DataError;

/// A text file.
#[derive(Clone, Debug)]
pub(super) struct TextFile {
    path: PathBuf,
    packed: Option<Arc<Packed>>,
}

/// The content of a compressed file.
#[derive(Debug)]
struct Packed {
    /// Blocks of [`BLOCK_BYTES`] bytes, the last one shorter, each compressed.
    blocks: Vec<Box<[u8]>>,
    /// Number of bytes before compression.
    bytes: u64,
    /// Number of bytes after compression.
    packed_bytes: u64,
}

impl TextFile {
    /// The file at `path`. A compressed one is read, if it fits into `bytes_max` of memory.
    pub(super) fn open(path: &Path, bytes_max: u64) -> Result<Self, DataError> {
        let packed = Packed::read(path, bytes_max)?.map(Arc::new);
        Ok(Self { path: path.into(), packed })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Number of bytes of the file that are held in memory.
    pub(super) fn held_bytes(&self) -> u64 {
        self.packed.as_ref().map_or(0, |packed| packed.packed_bytes)
    }

    pub(super) fn is_compressed(&self) -> bool {
        self.packed.is_some()
    }

    /// The text, from its start.
    pub(super) fn read(&self) -> Result<Box<dyn Source>, DataError> {
        match &self.packed {
            Some(packed) => {
                Ok(Box::new(PackedText { packed: Arc::clone(packed), at: 0, block: None }))
            }
            None => files::open(&self.path),
        }
    }

    /// The error for what begins at `byte`, with its line.
    pub(super) fn error_at(&self, byte: u64, reason: String) -> DataError {
        let line = self.read().map(|text| line_at(text, byte));
        match line {
            Ok(Ok(line)) => {
                DataError::Malformed { path: self.path.clone(), line: Some(line), reason }
            }
            Ok(Err(source)) => files::io_error(&self.path, source),
            Err(error) => error,
        }
    }
}

impl Packed {
    /// Reads the file at `path`; `None` if it is not compressed.
    fn read(path: &Path, bytes_max: u64) -> Result<Option<Self>, DataError> {
        let failed = |source| files::io_error(path, source);
        let mut file = BufReader::new(files::open(path)?);
        let head = file.fill_buf().map_err(failed)?;
        let mut text: Box<dyn Read> = if head.starts_with(GZIP) {
            Box::new(MultiGzDecoder::new(file))
        } else if head.starts_with(ZSTD) {
            let mut decoder = zstd::Decoder::with_buffer(file).map_err(failed)?;
            decoder.window_log_max(ZSTD_WINDOW_LOG_MAX).map_err(failed)?;
            Box::new(decoder)
        } else {
            return Ok(None);
        };
        let (mut blocks, mut bytes, mut packed_bytes) = (Vec::new(), 0, 0);
        loop {
            let mut block = Vec::new();
            text.by_ref().take(BLOCK_BYTES).read_to_end(&mut block).map_err(|error| {
                // An error of the file itself contains a complete error of its own.
                match files::io_error(path, error) {
                    DataError::Io { source, .. } if source.raw_os_error().is_none() => {
                        files::malformed(path, &format!("cannot be decompressed: {source}"))
                    }
                    error => error,
                }
            })?;
            if block.is_empty() {
                return Ok(Some(Self { blocks, bytes, packed_bytes }));
            }
            bytes += block.len() as u64;
            let block = zstd::bulk::compress(&block, ZSTD_LEVEL).map_err(failed)?;
            packed_bytes += block.len() as u64;
            blocks.push(block.into_boxed_slice());
            if packed_bytes > bytes_max {
                let reason = format!(
                    "compressed files of a job are held in memory, and with this one they exceed \
                     {} MiB; decompress it, write it as Parquet, or raise the reader's limit",
                    bytes_max >> 20
                );
                return Err(files::malformed(path, &reason));
            }
        }
    }

    fn block(&self, index: usize) -> io::Result<Vec<u8>> {
        zstd::bulk::decompress(&self.blocks[index], BLOCK_BYTES as usize)
    }
}

/// The content of a compressed file, for reading and seeking.
struct PackedText {
    packed: Arc<Packed>,
    at: u64,
    /// The block that was read last, and its number.
    block: Option<(u64, Cursor<Vec<u8>>)>,
}

impl Read for PackedText {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.at >= self.packed.bytes {
            return Ok(0);
        }
        let index = self.at / BLOCK_BYTES;
        let block = match &mut self.block {
            Some((held, block)) if *held == index => block,
            held => {
                let block = Cursor::new(self.packed.block(index as usize)?);
                &mut held.insert((index, block)).1
            }
        };
        block.set_position(self.at % BLOCK_BYTES);
        let bytes = block.read(buf)?;
        self.at += bytes as u64;
        Ok(bytes)
    }
}

impl Seek for PackedText {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let (from, offset) = match to {
            SeekFrom::Start(at) => (at, 0),
            SeekFrom::Current(offset) => (self.at, offset),
            SeekFrom::End(offset) => (self.packed.bytes, offset),
        };
        self.at = from.checked_add_signed(offset).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

/// Line number, from 1, of the record that a reader positioned at `byte` finds: blank lines before
/// it are counted.
fn line_at(file: impl Read, byte: u64) -> io::Result<u64> {
    let mut bytes = BufReader::new(file);
    let mut line = 1;
    let mut rest = byte;
    loop {
        let buffer = bytes.fill_buf()?;
        let before = rest.min(buffer.len() as u64) as usize;
        line += buffer[..before].iter().filter(|&&byte| byte == b'\n').count() as u64;
        rest -= before as u64;
        let done = buffer.is_empty() || rest == 0;
        bytes.consume(before);
        if done {
            break;
        }
    }
    for byte in bytes.bytes() {
        match byte? {
            b'\n' => line += 1,
            b'\r' => (),
            _ => break,
        }
    }
    Ok(line)
}

/// Default limit of the memory for compressed files of a worker.
pub(super) const PACKED_BYTES_MAX: u64 = 1 << 30;
const BLOCK_BYTES: u64 = 128 << 10;
const ZSTD_LEVEL: i32 = 1;
/// Greatest window of a zstd file: 128 MiB, as the zstd command accepts.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;
const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

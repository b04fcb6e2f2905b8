//! The file itself: opened, locked, and read and written in blocks.

use super::FileError;
use super::record::{HEADER_BYTES, Header, RECORD_BYTES, Record};
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, BufReader, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

/// What direct reads and writes begin at, and are long, multiples of: enough for every device that is in use.
pub(super) const BLOCK: u64 = 4_096;
/// How much of the records is read at once.
const READ_AHEAD: usize = 1 << 20;

/// Bytes that begin at a multiple of [`BLOCK`] in memory.
#[derive(Debug, Default)]
pub struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    pub(super) fn new(len: usize) -> Self {
        let bytes = vec![0; len + BLOCK as usize];
        let start = bytes.as_ptr().align_offset(BLOCK as usize);
        Self { bytes, start, len }
    }

    pub(super) fn whole(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }

    /// `page`, and zeroes behind it.
    pub(super) fn filled(&mut self, page: &[u8]) -> &[u8] {
        let whole = self.whole();
        whole[..page.len()].copy_from_slice(page);
        whole[page.len()..].fill(0);
        whole
    }
}

/// The file: for records, and, past the page cache if that can be, for slots.
#[derive(Debug)]
pub(super) struct Disk {
    records: File,
    slots: File,
    /// Offset and bytes of every write.
    #[cfg(test)]
    pub(super) written: std::sync::Mutex<Vec<(u64, Vec<u8>)>>,
}

impl Disk {
    pub(super) fn write_record(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        #[cfg(test)]
        self.note(bytes, at);
        self.records.write_all_at(bytes, at)
    }

    pub(super) fn write_slot(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        #[cfg(test)]
        self.note(bytes, at);
        self.slots.write_all_at(bytes, at)
    }

    pub(super) fn read_slot(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        self.slots.read_exact_at(into, at)
    }

    /// What is written is played back as a crash would leave it.
    #[cfg(test)]
    fn note(&self, bytes: &[u8], at: u64) {
        self.written.lock().unwrap().push((at, bytes.to_vec()));
    }
}

/// Opens the file and reads its records; makes or empties it if it is not what `header` says.
pub(super) fn open(path: &Path, header: &Header, bytes: u64) -> Result<(Disk, Vec<Record>), FileError> {
    let failed = |source| FileError::Io {
        path: path.to_owned(),
        source,
    };
    let options = || {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        options
    };
    let records = options().open(path).map_err(failed)?;
    match records.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(FileError::Locked(path.to_owned())),
        Err(TryLockError::Error(error)) => return Err(failed(error)),
    }
    let kept = if is_usable(&records, header, path)? {
        read_records(&records, header.slots).map_err(failed)?
    } else {
        create(&records, header).map_err(failed)?;
        Vec::new()
    };
    records.set_len(bytes).map_err(failed)?;
    let slots = match direct(&options(), path, bytes) {
        Ok(slots) => slots,
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "the file system has no direct I/O: pages go through its cache");
            options().open(path).map_err(failed)?
        }
    };
    let disk = Disk {
        records,
        slots,
        #[cfg(test)]
        written: std::sync::Mutex::default(),
    };
    Ok((disk, kept))
}

/// Whether the file is what `header` says. One that is new, or of our own kind, may be made so.
fn is_usable(file: &File, header: &Header, path: &Path) -> Result<bool, FileError> {
    let mut first = [0; HEADER_BYTES];
    let read = file.read_exact_at(&mut first, 0);
    let len = file.metadata().map(|m| m.len()).map_err(|source| FileError::Io {
        path: path.to_owned(),
        source,
    })?;
    if len == 0 {
        return Ok(false);
    }
    if read.is_err() || !Header::is_ours(&first) {
        return Err(FileError::Foreign(path.to_owned()));
    }
    let usable = first == header.bytes();
    if !usable {
        tracing::warn!(path = %path.display(), "the page file is of another model, size or version: it is emptied");
    }
    Ok(usable)
}

/// An empty page file. Its header is there for good before anything else, so that it is known to be ours.
fn create(file: &File, header: &Header) -> io::Result<()> {
    file.set_len(0)?;
    file.write_all_at(&header.bytes(), 0)?;
    file.sync_all()
}

fn read_records(file: &File, slots: u64) -> io::Result<Vec<Record>> {
    let mut reader = BufReader::with_capacity(READ_AHEAD, file);
    reader.seek(SeekFrom::Start(BLOCK))?;
    let mut records = Vec::new();
    for slot in 0..slots as u32 {
        let mut bytes = [0; RECORD_BYTES];
        match reader.read_exact(&mut bytes) {
            // A file that was never as long as it should be: the rest was lost.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
            done => done?,
        }
        records.extend(Record::read(slot, &bytes));
    }
    Ok(records)
}

/// The file past the page cache. Some file systems refuse that when it is opened, others when it is read.
fn direct(options: &OpenOptions, path: &Path, bytes: u64) -> io::Result<File> {
    let file = options
        .clone()
        .custom_flags(OFlags::DIRECT.bits().cast_signed())
        .open(path)?;
    let mut block = Buffer::new(BLOCK as usize);
    file.read_exact_at(block.whole(), bytes - BLOCK)?;
    Ok(file)
}

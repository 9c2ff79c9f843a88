/* Moves pieces of files without the GIL. */
#ifndef KVSTORE_FILES_H
#define KVSTORE_FILES_H

#include <stddef.h>
#include <sys/types.h>

#define END_OF_FILE -1

typedef struct {
    int fd, write;
    off_t offset;
    char *memory;
    size_t length; /* at most INT32_MAX */
    int error;     /* set by move_all: an errno, END_OF_FILE, or 0 if all was moved */
    size_t moved;  /* 0 before the call */
} piece;

/* Moves pieces in any order, on the ring of the calling thread if there can be one. */
void move_all(piece *pieces, size_t n);

#endif
